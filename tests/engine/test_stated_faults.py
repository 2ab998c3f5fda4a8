"""An InputError in the place of a client's model, and entries of clients that are no numbers."""

from __future__ import annotations

import pytest

import fastagg
from helpers import every_method

K = 4
IDS = ["a", "b", "c", "d"]


@pytest.mark.parametrize("name", every_method.METHODS)
def test_a_client_without_a_model_is_named_with_the_reason_or_left_out(name):
    g, sds = every_method.cohort()
    inputs, ids = every_method.round_inputs(name), every_method.IDS
    given = [*sds[:2], fastagg.InputError("it sent no arrays"), *sds[3:]]
    with pytest.raises(fastagg.BadClientError, match=r"client 2 \(id 'a'\): it sent no arrays") as caught:
        every_method.run(name, g, given, ids=ids, inputs=inputs)
    assert caught.value.reasons == {2: "it sent no arrays"}
    server, other = (fastagg.aggregator(name, on_bad_client=w, **every_method.OPTIONS[name]) for w in ("drop", "raise"))
    result = every_method.run(name, g, given, ids=ids, inputs=inputs, server=server)
    rest = [0, 1, 3, 4, 5, 6]
    expected = every_method.run(
        name, g, [sds[k] for k in rest], ids=[ids[k] for k in rest], inputs=every_method.some_of(name, inputs, rest),
        server=other,
    )  # fmt: skip
    assert result.dropped == {"a": "it sent no arrays"}
    models = [model for model in every_method.models(result) if model is not None]
    for mine, theirs in zip(models, every_method.models(expected), strict=True):
        assert all((mine[key] == theirs[key]).all() for key in theirs)


def test_it_is_the_reason_whatever_else_is_said_of_the_client():
    g, sds = every_method.cohort(K)
    given = [*sds[:3], fastagg.InputError("it sent no arrays")]
    with pytest.raises(fastagg.BadClientError, match=r"^client 3 \(id 'd'\): it sent no arrays$"):
        fastagg.fednova(g, given, [1, 2, 3, -1], local_steps=[1, 2, 3, None], client_ids=IDS)
    result = fastagg.fednova(g, given, [1, 2, 3, -1], local_steps=[1, 2, 3, None], client_ids=IDS, on_bad_client="drop")
    assert result.dropped == {"d": "it sent no arrays"}


@pytest.mark.parametrize("bad", ["3", b"3", True, pytest.param(10**5000, id="long")])
def test_what_is_no_number_is_refused_even_if_numpy_would_read_it(bad):
    g, sds = every_method.cohort(K)
    for given in ([1, 2, bad, 3], (1, 2, bad, 3), dict(zip(IDS, [1, 2, bad, 3], strict=True))):
        with pytest.raises(fastagg.BadClientError, match=r"^client 2 \(id 'c'\): its entry in sizes is .*number >= 0$"):
            fastagg.fedavg(g, sds, given, client_ids=IDS)
        with pytest.raises(fastagg.BadClientError, match=r"^client 2 \(id 'c'\): its entry in local_steps is .*> 0$"):
            fastagg.fednova(g, sds, local_steps=given, client_ids=IDS)
        assert list(fastagg.fedavg(g, sds, given, client_ids=IDS, on_bad_client="drop").dropped) == ["c"]
