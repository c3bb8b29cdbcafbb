"""The command line. Commands are imported when they are called, so `specbuild --help` is quick."""

from __future__ import annotations

import signal
from importlib import import_module

import click

from specbuild import __version__
from specbuild.errors import SpecbuildError

# One row a command: its module is specbuild.cli.<name>_command; the text is what `specbuild --help` shows.
COMMANDS = {
    "check": "Check a pair without reading weights.",
    "plan": "Plan memory and draft length before building.",
    "lock": "Pin what a pair is made from.",
    "convert": "Convert both models to TensorRT-LLM checkpoints.",
    "quantize": "Quantize both checkpoints.",
    "build": "Build both engines.",
    "package": "Write the Triton model repository.",
    "run": "Run all stages in order, then a short verify.",
    "generate": "Generate in this process, on the built engines.",
    "verify": "Compare speculative with plain decoding.",
    "bench": "Measure speculative against plain decoding.",
    "serve": "Serve the repository with Triton.",
    "call": "Stream an answer from a running server.",
    "deploy": "Write compose or Kubernetes files.",
}


class LazyGroup(click.Group):
    """A group whose commands live in modules that are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"specbuild.cli.{cmd_name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specbuild")
def cli() -> None:
    """From a target and a draft LLM to a Triton server that decodes speculatively.

    \b
    specbuild run configs/demo.yaml       # convert, quantize, build, package, verify
    specbuild serve configs/demo.yaml     # Triton, in the foreground
    specbuild call --prompt "def main("   # stream an answer
    """


def main() -> None:
    """Run the command line: a SpecbuildError becomes one line and exit code 1. Both signals clean up, also in a shell's background."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        cli.main(standalone_mode=False)
    except SpecbuildError as error:
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise SystemExit(1) from None
    except click.UsageError as error:
        error.show()
        raise SystemExit(2) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except OSError as error:  # a full disk, a directory that cannot be written, a path that is no directory
        if error.filename is None:
            raise
        click.echo(f"Error: Cannot use {error.filename}: {error.strerror}. Free it, or choose another path.", err=True)
        raise SystemExit(1) from None
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        raise SystemExit(130) from None
