"""specbuild serve."""

from pathlib import Path

import click

from specbuild.cli.options import config_argument, locked_option
from specbuild.config import load_config
from specbuild.lock import check_lock
from specbuild.serve import ALONE_SECONDS, ENGINES_SECONDS, describe_serve, run_serve
from specbuild.triton.server import LOOPBACK, Ports

PORT = click.IntRange(1, 65535)


@click.command("serve")
@config_argument
@click.option("--http-port", type=PORT, default=8000, show_default=True)
@click.option("--grpc-port", type=PORT, default=8001, show_default=True)
@click.option("--metrics-port", type=PORT, default=8002, show_default=True)
@click.option("--address", default=LOOPBACK, show_default=True, help="Address to listen on; 0.0.0.0 = all.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, 1e6, min_open=True),
    help=f"Seconds to wait until ready.  [default: {ALONE_SECONDS}; with TensorRT engines {ENGINES_SECONDS}]",
)
@locked_option
@click.option("--dry-run", is_flag=True, help="Print the command that would be run, on any machine.")
def command(
    config: Path, http_port: int, grpc_port: int, metrics_port: int, address: str, timeout: float | None, locked: bool, dry_run: bool
) -> None:
    """Serve the repository with Triton.

    In the foreground, until Ctrl-C or SIGTERM. Logs go to stderr.

    \b
    specbuild serve configs/demo.yaml --http-port 9000 --grpc-port 9001 --metrics-port 9002
    specbuild serve configs/demo.yaml --dry-run
    """
    pair, ports = load_config(config), Ports(http_port, grpc_port, metrics_port)
    if locked:
        check_lock(pair, ("serve",))
    if dry_run:
        click.echo(describe_serve(pair, ports, address))
        return
    run_serve(pair, ports, address, timeout)
