"""Plain-text help pages that never truncate option names, with panels as headings.

typer's own pages are three-column tables, which leave 24 of 80 columns for the help text and truncate long names.
"""

import os
import re
from typing import Any

import typer
import typer.core

PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"max_content_width": 120},
}
"""Arguments of every `typer.Typer` of the command line."""

ALL = "dsjax.all"
"""Key of a context's `meta`: whether help shows advanced options and other engines' option names."""
_FIRST_PANELS = ("Arguments", "Options")
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""click's `UsageError`, which typer does not export. Later versions of typer vendor click, so it is not imported from click."""


class PanelledCommand(typer.core.TyperCommand):
    """A command that lists options by panel; options without a panel come first, as "Options".

    Accepts other engines' option names that have a counterpart; for the others, the error names the alternative.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's arguments.

        Raises:
            UsageError: the arguments are invalid.
        """
        from dsjax.cli.given import translate_words
        from dsjax.cli.other_engines import advice, unread_variables

        parameters = self.get_params(ctx)
        options = {name: option for option in parameters for name in (*option.opts, *option.secondary_opts)}
        words = translate_words(args, options, ctx)
        try:
            rest = super().parse_args(ctx, list(words))
        except _UsageError as error:
            lines = advice(words, options)
            if "unexpected extra argument" in error.message and "--model" in options:
                lines.append("give the model as --model MODEL")
            if not lines:
                raise
            raise _UsageError("\n".join([error.format_message(), *lines]), ctx) from None
        for line in unread_variables(words, options, os.environ):
            typer.echo(f"warning: {line}", err=True)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections."""
        from dsjax.cli.other_engines import rows

        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            is_option, suffix = parameter.param_type_name == "option", ""
            shows_all = is_option and ctx.meta.get(ALL)
            if shows_all:
                parameter.hidden = False
                names = (*parameter.opts, *parameter.secondary_opts)
                aliases = [row.option for row in rows().values() if row.verdict == "accepted" and row.ours in names]
                suffix = f"  [also: {', '.join(aliases)}]" if aliases else ""
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            default_title = "Options" if is_option else "Arguments"
            title = getattr(parameter, "rich_help_panel", None) or default_title
            if parameter.default is False and parameter.secondary_opts and not shows_all:
                record = (parameter.opts[0], record[1])  # its `--no-` form is the default
            names = re.sub(r"<list\[(\w+)\]>", r"<\1>", record[0])  # the help text says that the option can be repeated
            text = re.sub(r"\[default: \((.*)\)\]", r"[default: \1]", record[1])  # so typer shows a default in words
            sections.setdefault(title, []).append((names, text + suffix))
        for title in sorted(
            sections, key=lambda title: _FIRST_PANELS.index(title) if title in _FIRST_PANELS else len(_FIRST_PANELS)
        ):
            with formatter.section(title):
                formatter.write_dl(sections[title])


class Commands(typer.core.TyperGroup):
    """A group that lists each command with the full first paragraph of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, (command.help or "").partition("\n\n")[0]) for name, command in commands])
