"""Groups of commands. For an unknown command, the error lists the known commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from weft.bench.core.arguments import one_of


class Named(TyperGroup):
    """A group of commands. For an unknown command, its error lists the known commands."""

    noun = "command"
    """The word for a command of the group in error texts, such as "operator"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raise `ValueError` for an option before the command's name."""
        known = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        if args and args[0].startswith("-") and args[0].partition("=")[0] not in known:
            raise ValueError(
                f"option {args[0]} cannot come before the {self.noun}: write the {self.noun} first, one of "
                f"{', '.join(self.list_commands(ctx))}"
            )
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            raise one_of(self.noun, args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)
