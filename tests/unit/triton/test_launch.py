"""Which processes serve which engines: the contract's modes, and the flags of each segment, by upstream's launcher."""

import pytest

from specbuild.errors import ServingError
from specbuild.triton.contract import ENGINE
from specbuild.triton.launch import Launch, find_launch, format_command
from specbuild.triton.pbtxt import make_model
from specbuild.triton.trtllm_model import Place, make_trtllm_model


def configs(**places):
    """Configs of engines; a place is (devices,) or (devices, participants)."""
    made = {name: Place(place[0], (*place[1:], ())[0], 64, 0.5) for name, place in places.items()}
    engines = {name: make_trtllm_model(name, place, 4, fast_logits=False) for name, place in made.items()}
    return {"ensemble": make_model("ensemble", ENGINE, max_batch_size=1), **engines}


EIGHT = tuple(range(8))
MODES = {
    "one GPU shared": ({"target": ((0,),), "draft": ((0,),)}, Launch("leader", 1, ("target", "draft"), 1)),
    "another GPU shared": ({"target": ((3,),), "draft": ((3,),)}, Launch("leader", 1, ("target", "draft"), 4)),
    "two GPUs": ({"target": ((0,),), "draft": ((1,),)}, Launch("spawn", 1, ("target", "draft"), 2)),
    "target tp 8, draft tp 1": ({"target": (EIGHT,), "draft": ((0,),)}, Launch("spawn", 1, ("target", "draft"), 8)),
    "both tp 2 on the same": ({"target": ((0, 1),), "draft": ((0, 1),)}, Launch("spawn", 1, ("target", "draft"), 2)),
    "fast logits, one GPU": ({"target": ((0,), (2,)), "draft": ((0,), (1,))}, Launch("ranks", 3, ("target", "draft"), 1)),
    "fast logits, tp 8": (
        {"target": (EIGHT, tuple(range(2, 10))), "draft": ((0,), (1,))},
        Launch("ranks", 10, ("target", "draft"), 8),
    ),
    "no draft model": ({"target": ((0,),)}, Launch("leader", 1, ("target",), 1)),
    "no draft model, tp 2": ({"target": ((0, 1),)}, Launch("leader", 2, ("target",), 2)),
    "no such engine": ({}, Launch("alone", 1, (), 0)),
}


@pytest.mark.parametrize(("places", "launch"), MODES.values(), ids=MODES)
def test_mode(places, launch):
    assert find_launch(configs(**places)) == launch


@pytest.mark.parametrize(
    "places",
    [
        {"target": ((0,), (0,)), "draft": ((0,), (1,))},  # rank 0 serves
        {"target": ((0,), (1,)), "draft": ((0,), (1,))},
        {"target": ((0,), (3,)), "draft": ((0,), (1,))},
        {"target": ((0,), (1,)), "draft": ((0,),)},
    ],
)
def test_participants_that_do_not_share_out_the_ranks_are_refused(places):
    with pytest.raises(ServingError, match="participant_ids"):
        find_launch(configs(**places))


def segments(launch):
    command = launch.make_command(lambda rank: ["tritonserver", f"--rank={rank}"])
    assert command[:2] == ["mpirun", "--allow-run-as-root"]
    parts = [[]]
    for word in command[2:]:
        parts.append([]) if word == ":" else parts[-1].append(word)
    assert all(part[:3] == ["-n", "1", "tritonserver"] for part in parts)
    return [part[3:] for part in parts]


LOAD = ["--model-control-mode=explicit", "--load-model=target", "--load-model=draft"]
POOLS = ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]


@pytest.mark.parametrize(
    ("launch", "expected", "environment"),
    [
        (Launch("leader", 1, ("target", "draft"), 1), [["--rank=0"]], {}),
        (Launch("leader", 2, ("target",), 2), [["--rank=0"], ["--rank=1", *LOAD[:2]]], {}),
        (
            Launch("spawn", 1, ("target", "draft"), 2),
            [["--rank=0", *POOLS, "--cuda-memory-pool-byte-size=0:0", "--cuda-memory-pool-byte-size=1:0"]],
            {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"},
        ),
        (
            Launch("ranks", 3, ("target", "draft"), 1),
            [["--rank=0"], ["--rank=1", *LOAD], ["--rank=2", *LOAD]],
            {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0"},
        ),
    ],
    ids=["leader", "leader of two", "spawn", "ranks"],
)
def test_flags_of_every_segment_and_the_environment(launch, expected, environment):
    assert segments(launch) == expected
    assert launch.environment == environment


def test_alone_needs_no_mpi():
    assert Launch().make_command(lambda rank: ["tritonserver"]) == ["tritonserver"]
    assert Launch().environment == {}


def test_a_printed_command_is_quoted_for_a_shell():
    text = format_command(["mpirun", "-n", "1", "a b", ":", "-n", "1", "c"], {"A": "$B/c"}, "/my dir")
    assert text == "cd '/my dir' && \\\nA=\"$B/c\" \\\nmpirun \\\n-n 1 'a b' : \\\n-n 1 c"
