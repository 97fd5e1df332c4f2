"""Programs of a few lines, as XLA's compilers print them."""

from dsjax.dryrun.program import Program


def computation(name, *lines):
    """A computation that others call; its signature is not read."""
    body = "".join(f"  {line}\n" for line in lines)
    return f"\n%{name} (x: f32[8]) -> f32[8] {{\n{body}}}\n"


def program_of(*lines, others=""):
    """A program whose entry has these lines. others: the computations that it calls."""
    return Program.parse(f"HloModule m, is_scheduled=true\n{others}\nENTRY {computation('main', *lines).lstrip()}")
