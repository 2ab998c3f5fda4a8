"""The Gram of all client vectors, alone and with the weighted sum in the same read."""

import torch

import fastagg
from benchmarks.conftest import cohorts
from benchmarks.torch_code import CONTESTANTS

MOST = 2e9  # bytes of clients that stacked copies are made of


@cohorts(
    ("in_cache", 100), ("resnet20", 5), ("resnet20", 20), ("resnet20", 100), ("lora", 20), ("resnet18", 5),
    ("resnet18", 20), ("resnet18", 100), ("vit_b", 5), ("vit_b", 20),
    ("resnet18", 20, "bfloat16"), ("resnet18", 20, "float16"), ("resnet18", 20, "float64"),
)  # fmt: skip
def test_gram(cohort, contest):
    g, clients, job = cohort.global_sd, cohort.client_sds, CONTESTANTS["gram"]
    others = job.in_pytorch()
    if cohort.bytes > MOST:
        del others["usual PyTorch"]
    info = {}
    if cohort.dtype == "float32":
        ours = fastagg.gram(g, clients)
        job.agree(ours, others["best PyTorch"](g, clients))
        if "usual PyTorch" in others:  # one long float32 matmul, which can lose most digits: reported, not asserted
            info["usual_error"] = error(others["usual PyTorch"](g, clients).double(), ours.matrix)
    else:
        others = {}  # PyTorch would multiply in the models' own dtype, and so compute something else
    if cohort.K <= 20 and cohort.model != "vit_b":
        check(g, clients)
    shown = (cohort.model, cohort.K, cohort.dtype) == ("resnet18", 20, "float32")
    jobs = {name: lambda f=f: f(g, clients) for name, f in others.items()}
    contest(cohort, "gram", lambda: fastagg.gram(g, clients), jobs, memory=shown, **info)


@cohorts(("resnet20", 20), ("resnet18", 20), ("resnet18", 20, "bfloat16"))
def test_gram_mix(cohort, contest):
    g, clients = cohort.global_sd, cohort.client_sds
    weights = torch.full((cohort.K,), 1 / cohort.K)
    gram, out = fastagg.gram_mix(g, clients, weights)
    assert torch.equal(gram.matrix, fastagg.gram(g, clients).matrix)
    assert all(torch.equal(out[key], value) for key, value in fastagg.mix(clients, weights).items())
    jobs = {
        "fastagg mix": lambda: fastagg.mix(clients, weights, out=out),
        "fastagg gram": lambda: fastagg.gram(g, clients),
    }
    contest(cohort, "gram_mix", lambda: fastagg.gram_mix(g, clients, weights, out=out), jobs)


def check(g: dict, clients: list[dict]) -> None:
    """Against the float64 reference that defines it"""
    for layerwise in (False, True):
        got, expected = (fastagg.gram(g, clients, layerwise=layerwise, backend=b).matrix for b in ("cpu", "reference"))
        assert error(got, expected) < 1e-6


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, relative to the lengths of the two vectors that an entry is the product of"""
    norms = expected.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = (norms[..., :, None] * norms[..., None, :]).clamp(min=1e-300)
    return ((got - expected).abs() / scale).max().item()
