"""What an aggregator remembers, on disk: the same after a crash, and refused where it does not fit."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from cohort import assert_same_bits
from every_method import METHODS, OPTIONS, cohort, models, round_info
from test_nonfinite import IDS, same

import fastagg
from fastagg import files

REMEMBERS = OPTIONS | {"fedawa": {"variant": "released"}}


def server(name):
    return fastagg.aggregator(name, **REMEMBERS.get(name, {}))


def play(aggregator, seed):
    g, clients = cohort(seed=seed)
    return aggregator.aggregate(g, clients, client_ids=IDS, **round_info(aggregator.name))


@pytest.mark.parametrize("name", METHODS)
def test_a_server_goes_on_where_it_was(name, tmp_path):
    one, two = server(name), server(name)
    play(one, 0)
    one.save(tmp_path / "state.safetensors")
    two.load(str(tmp_path / "state.safetensors"))
    assert os.listdir(tmp_path) == ["state.safetensors"]
    assert same(one.state_dict(), two.state_dict())
    for a, b in zip(models(play(one, 1)), models(play(two, 1)), strict=True):
        assert_same_bits(a, b)
    assert same(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("name", METHODS)
def test_what_does_not_fit_changes_nothing(name, tmp_path):
    one, path = server(name), tmp_path / "state.safetensors"
    play(one, 0)
    one.save(path)
    before = copy.deepcopy(one.state_dict())
    content = path.read_bytes()
    for length in (0, 5, 9, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(fastagg.InputError, match=r"state.safetensors is not a file that fastagg saved"):
            one.load(path)
    other = server("fedavg" if name != "fedavg" else "simprox")
    other.save(path)
    with pytest.raises(fastagg.InputError, match=f"{name} state: "):
        one.load(path)
    with pytest.raises(FileNotFoundError):
        one.load(tmp_path / "none")
    path.write_bytes(content)
    assert same(one.state_dict(), before)


def test_states_of_another_model_or_form_are_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    layerwise = fastagg.FedAWA(variant="released", layerwise=True)
    play(layerwise, 0)
    layerwise.save(path)
    for wrong in (fastagg.FedAWA(variant="released"), fastagg.FedAWA(variant="paper", layerwise=True)):
        with pytest.raises(fastagg.InputError, match="fedawa state"):
            wrong.load(path)
        assert not wrong.state_dict()["client_ids"]
    adam = fastagg.FedAdam()
    play(adam, 0)
    adam.save(path)
    adam.load(path)
    state = copy.deepcopy(adam.state_dict())
    other = {key: torch.zeros(3) for key in ("a", "b")}
    with pytest.raises(fastagg.InputError, match=r"was of shape|not a parameter"):
        adam.aggregate(other, [other, other])
    assert same(adam.state_dict(), state)


def test_a_failed_write_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    one = server("fedawa")
    one.save(path)
    content = path.read_bytes()
    play(one, 0)

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space left"):
            one.save(path)
    assert path.read_bytes() == content
    one.save(path)
    assert path.read_bytes() != content
    assert list(tmp_path.iterdir()) == [path]  # nothing is left of the attempt that failed


def test_every_dtype_is_written_as_the_library_reads_it(tmp_path):
    gen = torch.Generator().manual_seed(0)
    for dtype in files.DTYPES:
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (48,), generator=gen, dtype=torch.uint8)
        x = bits.view(dtype)
        files.save(tmp_path / "x", {"bool": torch.tensor(True), "x": x, "scalar": x[0], "none": x[:0], "part": x[::2]})
        back = files.load(tmp_path / "x")
        assert back["x"].dtype == dtype
        for name, expected in {"x": x, "scalar": x[0], "none": x[:0], "part": x[::2]}.items():
            assert back[name].shape == expected.shape
            assert back[name].contiguous().view(-1).view(torch.uint8).tolist() == (
                expected.contiguous().view(-1).view(torch.uint8).tolist()
            )


def test_a_dtype_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(fastagg.InputError, match="complex128, which a safetensors file cannot hold"):
        files.save(tmp_path / "x", {"x": torch.zeros(2, dtype=torch.complex128)})


def test_lazy_conjugates_and_negatives_keep_their_values(tmp_path):
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    files.save(tmp_path / "x", {"conj": x.conj(), "neg": x.conj().imag})
    back = files.load(tmp_path / "x")
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert back["neg"].tolist() == [-2.0, 4.0]
