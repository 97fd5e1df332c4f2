"""Which part of an executor carries out a command: one for each kind, one for each page source, and none is an error that names it."""

from dsjax.engine.contract.commands import Copy, Custom, Flush
from dsjax.engine.device.access import CommandTable, Handler


def handler(name: str) -> Handler:
    """Its execution says which handler it is of, and which command it was given."""
    return Handler(lambda pending, command: iter([(name, pending.command is command)]))


def test_a_command_is_carried_out_by_the_part_of_its_kind_and_a_custom_one_by_that_of_its_source():
    table = CommandTable()
    table.add(Copy, handler("copies"))
    table.add(Flush, handler("flushes"))
    table.add("here", handler("here"))
    table.add("there", handler("there"))
    commands = (Flush(), Copy([b""]), Custom("there", b""), Custom("here", b""))
    said = [list(table.launch(command).running) for command in commands]
    assert said == [[("flushes", True)], [("copies", True)], [("there", True)], [("here", True)]]
