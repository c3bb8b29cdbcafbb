"""specbuild deploy."""

from pathlib import Path

import click

from specbuild.cli.options import config_argument
from specbuild.config import load_config
from specbuild.deploying import TARGETS


@click.command("deploy")
@config_argument
@click.option("--to", type=click.Choice(list(TARGETS)), required=True, help="What to write files for.")
@click.option("--out", type=click.Path(path_type=Path), help="Directory to write them into.  [default: print them]")
@click.option("--image", help="Image to run, with a fixed tag or digest.  [default: specbuild:VERSION-cpu or -gpu]")
@click.option("--gpus-per-node", type=click.IntRange(1, 16), default=8, show_default=True, help="GPUs that a machine has.")
@click.option("--gpu-product", help="Label nvidia.com/gpu.product of the nodes.  [default: by serving.gpu]")
@click.option("--namespace", help="Kubernetes namespace.  [default: kubectl's]")
@click.option("--storage", help="Size of the Kubernetes volume for models and engines.  [default: 100Gi]")
def command(
    config: Path, to: str, out: Path | None, image: str | None, gpus_per_node: int, gpu_product: str | None, namespace: str | None,
    storage: str | None,
) -> None:  # fmt: skip
    """Write compose or Kubernetes files.

    The container sees the current directory as /work: CONFIG, its workdir and its models must lie below it. What to run next is said
    on stderr.

    \b
    specbuild deploy configs/demo.yaml --to compose --out deploy
    specbuild deploy pair.yaml --to kubernetes --out deploy --image registry.example/specbuild:0.1.0-gpu
    """
    if to == "compose" and (gpu_product or namespace or storage):
        raise click.UsageError("--gpu-product, --namespace and --storage are for Kubernetes only: leave them out with --to compose.")
    from specbuild.deploy import Options, run_deploy

    text = run_deploy(load_config(config), Options(to, out, image, gpus_per_node, gpu_product, namespace, storage))
    if text is not None:
        click.echo(text, nl=False)
