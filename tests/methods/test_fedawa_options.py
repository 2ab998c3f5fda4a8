"""FedAWA's options and logits that are refused."""

import math

import pytest
import torch

import fastagg
from helpers.fedawa import VARIANTS, make_cohort

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "eq3"}, {"variant": None}, {"optimizer": "rmsprop"}, {"optimizer": None}, {"reg": "l2"},
        {"steps": -1}, {"steps": 1.5}, {"lr": -0.1}, {"lr": math.nan}, {"lr": math.inf}, {"gamma": math.nan},
        {"gamma": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        fastagg.FedAWA(**options)
    with pytest.raises(ValueError, match=next(iter(options))):
        fastagg.fedawa(*make_cohort(), **options)


@pytest.mark.parametrize(("shape", "layerwise"), [((4,), False), ((5, 5), False), ((1, 5), False), ((), False),
                                                  ((5,), True), ((4, 5), True), ((5, 4), True)])  # fmt: skip
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_wrong_shape(variant, shape, layerwise):
    with pytest.raises(fastagg.InputError, match="logits"):
        fastagg.fedawa(*make_cohort(), variant=variant, logits=torch.zeros(shape), layerwise=layerwise)


def test_logits_that_are_not_finite():
    with pytest.raises(fastagg.InputError, match="logits"):
        fastagg.fedawa(*make_cohort(), logits=torch.tensor([0.0, 0.0, math.nan, 0.0, 0.0]))
