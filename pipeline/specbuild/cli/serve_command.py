"""specbuild serve."""

from pathlib import Path

import click

from specbuild.cli.options import config_argument
from specbuild.config import load_config
from specbuild.serve import run_serve
from specbuild.triton.server import LOOPBACK, Ports

PORT = click.IntRange(1, 65535)


@click.command("serve")
@config_argument
@click.option("--http-port", type=PORT, default=8000, show_default=True)
@click.option("--grpc-port", type=PORT, default=8001, show_default=True)
@click.option("--metrics-port", type=PORT, default=8002, show_default=True)
@click.option("--address", default=LOOPBACK, show_default=True, help="Address to listen on; 0.0.0.0 = all.")
@click.option(
    "--timeout", type=click.FloatRange(0, 1e6, min_open=True), default=120, show_default=True, help="Seconds to wait until ready."
)
def command(config: Path, http_port: int, grpc_port: int, metrics_port: int, address: str, timeout: float) -> None:
    """Serve the repository with Triton.

    In the foreground, until Ctrl-C or SIGTERM. Logs go to stderr.

    \b
    specbuild serve configs/demo.yaml --http-port 9000 --grpc-port 9001 --metrics-port 9002
    """
    run_serve(load_config(config), Ports(http_port, grpc_port, metrics_port), address, timeout)
