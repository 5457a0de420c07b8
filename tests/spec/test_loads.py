"""Loads of experts and traffic matrices; expected counts are worked out by hand from the workloads' descriptions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distbench.spec import UserError
from distbench.spec.expert_loads import LOADS, load_of, load_of_module, matrix_of, traffic_of

# 16 experts on 4 ranks, 2 of 16 per token: a hot set of 4 experts, and 512 tokens, so 1024 choices per rank.
SHAPE = {"num_ranks": 4, "num_experts": 16, "top_k": 2, "num_tokens": 512}
EVEN = [1024] * 4
# Three quarters of the tokens choose hot experts only (768), a quarter any (256, of which 64 are on each rank).
ONE_HOT = [4 * (768 + 64), 4 * 64, 4 * 64, 4 * 64]


@pytest.mark.parametrize(
    ("load", "received"),
    [
        ("uniform", [EVEN]),
        ("W0", [EVEN]),
        ("W1", [ONE_HOT]),
        ("W2", [ONE_HOT]),
        ("W3", [EVEN]),
        ("W4", [EVEN]),
        ("W5", [[0, 0, 2048, 2048]]),
        ("W6", [[*ONE_HOT[-at:], *ONE_HOT[:-at]] for at in (0, 1, 2, 3) for _ in range(3)]),
        ("W7", [EVEN, EVEN, EVEN, [4 * (512 + 128), 512, 512, 512]]),
    ],
)
def test_rows_that_ranks_receive(load: str, received: list[list[int]]) -> None:
    matrices = traffic_of(load, **SHAPE)
    arrived = [[sum(column) for column in zip(*matrix, strict=True)] for matrix in matrices]
    # Each of 4 senders rounds each of 16 ends.
    assert len(arrived) == len(received)
    for got, by_hand in zip(arrived, received, strict=True):
        assert all(abs(rows - expected) <= 4 for rows, expected in zip(got, by_hand, strict=True))


def test_ragged_sources_send_one_to_four_tenths() -> None:
    (matrix,) = traffic_of("W4", **SHAPE)
    sent = [sum(row) for row in matrix]
    assert sum(sent) == 4 * 1024 and [round(10 * rows / 4096) for rows in sent] == [1, 2, 3, 4]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 1), (4, 4), (6, 5), (8, 2), (64, 8)])
def test_no_expert_has_more_than_one_choice_of_a_token(load: str, num_experts: int, top_k: int) -> None:
    for weights in load_of(load, num_experts, top_k).steps:
        assert len(weights) == num_experts and min(weights) >= 0
        assert max(weights) / sum(weights) <= 1 / top_k + 1e-9


def test_a_recorded_routing_of_modules_is_one_exchange_each(tmp_path: Path) -> None:
    file = tmp_path / "routing.json"
    file.write_text(json.dumps({"layers.0.feed_forward": [3, 1, 0, 0], "layers.1.feed_forward": [0, 0, 2, 2]}))
    matrices = traffic_of(str(file), num_ranks=2, num_experts=4, top_k=1, num_tokens=8)
    assert matrices == [((8, 0), (8, 0)), ((0, 8), (0, 8))]
    assert load_of_module(str(file), 4, 1, "layers.1.feed_forward") == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("zipff", "load 'zipff' is unknown; use uniform, zipf, W0, W1, W2, W3, W5, or a JSON file"),
        ("other.json", "other.json: it has counts of 3 experts, but the model has 4; record this model"),
        ("modules.json", "modules.json, b: it has counts of 2 experts, but the model has 4"),
        ("broken.json", "give a JSON list of counts"),
        ("missing.json", "missing.json cannot be read"),
        ("W4", "load W4 is for exchanges only, because ranks have different numbers of tokens; use scenario"),
        ("W7", "load W7 is for exchanges only, because the load differs between steps; use scenario"),
        ("named.json", "has no module 'layers.0', only a"),
        ("empty.json", "empty.json: this object has no module; give a list of counts per module name"),
        ("one.json", "one.json, a: expert 2 has 60.0% of the choices, but at most 50.0% are possible, because the 2"),
    ],
)
def test_unusable_loads_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {"other": "[1, 2, 3]", "modules": '{"a": [1, 1, 1, 1], "b": [1, 1]}', "broken": "[1,"}
    contents |= {"empty": "{}", "one": '{"a": [1, 1, 6, 2]}'}
    for name, content in {**contents, "named": '{"a": [1, 1, 1, 1]}'}.items():
        Path(f"{name}.json").write_text(content)
    with pytest.raises(UserError) as refused:
        load_of_module(load, 4, 2, "layers.0")
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1, 2], [3]], "is not square: it has 2 rows of 1 or 2 numbers"),
        ([[1, 2, 3], [1, 2, 3]], "is not square: it has 2 rows of 3 numbers; give 2 rows of 2 numbers"),
        ([], "is not square: it has 0 rows of no numbers"),
        ([[1] * 3] * 3, "has 3 ranks, but the group has 2"),
        ([[1, -2], [3, 4]], "entry [0][1] is -2; give the number of rows that the rank sends, a whole number from 0"),
        ([[1, 2], [3.5, 4]], "entry [1][0] is 3.5; give"),
        ([[1, True], [3, 4]], "entry [0][1] is True; give"),
        ([[0, 0], [0, 0]], "moves no row; give at least one entry above 0"),
        ("text", "matrix is not a list of rows; give 2 rows of 2"),
        (
            {"matrix": [[1, 2], [3, 4]], "sent": [3, 8]},
            "does not add up: 'sent' is [3, 8], but the entries give [3, 7]",
        ),
        (
            {"matrix": [[1, 2], [3, 4]], "received": [4]},
            "does not add up: 'received' is [4], but the entries give [4, 6]",
        ),
        (
            {"matrix": [[1, 2], [3, 4]], "recieved": [1]},
            "has an unknown field 'recieved'; use matrix, sent, received",
        ),
        ({"sent": [3, 7]}, "has no field 'matrix'; add it with a list of rows"),
    ],
)
def test_unusable_matrices_are_one_sentence(tmp_path: Path, matrix: Any, message: str) -> None:
    file = tmp_path / "matrix.json"
    file.write_text(json.dumps(matrix))
    for given in [str(file), *([matrix] if not isinstance(matrix, str) else [])]:
        with pytest.raises(UserError) as refused:
            matrix_of(given, 2)
        expected = message if given == matrix else message.removeprefix("matrix ")
        assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_a_matrix_with_its_totals_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    file.write_text(json.dumps({"matrix": [[1, 2], [3, 4]], "sent": [3, 7], "received": [4, 6]}))
    assert matrix_of(str(file), 2) == matrix_of([[1, 2], [3, 4]], 2) == ((1, 2), (3, 4))


def test_an_array_and_a_tensor_are_matrices() -> None:
    for given in (np.array([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]])):
        assert matrix_of(given, 2) == matrix_of({"matrix": given, "sent": given.sum(1)}, 2) == ((1, 2), (3, 4))
    with pytest.raises(UserError, match="matrix is not a list of rows"):
        matrix_of(np.array(3), 2)
