"""Every shipped YAML loads and fits."""

import json
from pathlib import Path

import pytest

from specbuild.check import check_names, check_pair
from specbuild.config import load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
DEMO = CONFIGS[0].parent / "demo"
MADE = ("bench",)  # their target is made by a script, not shipped


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    check_names(load_config(path))


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem not in MADE], ids=lambda path: path.stem)
def test_every_config_of_shipped_models_passes_check(path: Path) -> None:
    report = check_pair(load_config(path))
    assert report.target.weights_seen
    assert report.draft.weights_seen


def test_the_demo_models_are_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= 16 << 20


def test_the_demo_pair_says_what_it_was_trained_on() -> None:
    note = json.loads((DEMO / "training.json").read_text())
    assert {"corpus", "corpus_licence", "seed", "command", "held_out_loss_nats_per_token"} <= note.keys()
