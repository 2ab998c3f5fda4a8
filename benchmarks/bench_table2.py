"""The setting of the FedAWA paper's Table 2: ResNet-20, CIFAR-10, 20 clients; FedLAW: 200 proxy samples, 100 epochs.

FedLAW trains, so its time is that of ResNet-20 on this machine: two epochs are measured and the report says so.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fastagg
from benchmarks import models
from benchmarks.conftest import cohorts
from benchmarks.torch_code import CONTESTANTS

EPOCHS, PAPER_EPOCHS, SAMPLES, BATCH = 2, 100, 200, 100


def usual_fedlaw(model: nn.Module, client_sds: list[dict], proxy: list, epochs: int) -> list[float]:
    """Every step scales K models and adds them up under autograd. Returns the mean loss of each epoch."""
    names = [name for name, _ in model.named_parameters()]
    logits, log_gamma = torch.zeros(len(client_sds), requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([logits, log_gamma], lr=0.01, betas=(0.5, 0.999))
    losses = []
    for _ in range(epochs):
        total = 0.0
        for images, labels in proxy:
            weights = torch.softmax(logits, 0) * log_gamma.exp()
            mixed = {name: sum(w * sd[name] for w, sd in zip(weights, client_sds, strict=True)) for name in names}
            loss = nn.functional.cross_entropy(functional_call(model, mixed, (images,)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(proxy))
    return losses


@cohorts(("resnet20", 20))
def test_table2_fedlaw(cohort, contest):
    g, clients = cohort.global_sd, cohort.client_sds
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    proxy = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    model = models.ResNet20()
    model.load_state_dict(g)

    def ours() -> fastagg.Result:
        return fastagg.fedlaw(g, clients, model=model, proxy=proxy, epochs=EPOCHS, progress=False)

    def usual() -> list[float]:
        return usual_fedlaw(model, clients, proxy, EPOCHS)

    assert ours().losses == pytest.approx(usual(), rel=1e-4)
    contest(cohort, "table2_fedlaw", ours, {"usual PyTorch": usual}, epochs=EPOCHS, paper_epochs=PAPER_EPOCHS)


@pytest.mark.parametrize("name", ["fedavg", "ldawa", "fedawa", "fedawa_released", "fedawa_layerwise"])
@cohorts(("resnet20", 20))
def test_table2(cohort, contest, name):
    g, clients, job = cohort.global_sd, cohort.client_sds, CONTESTANTS[name]
    ours = job.fastagg(g, clients)
    job.agree(ours, job.usual(g, clients))
    contest(cohort, f"table2_{name}", lambda: job.fastagg(g, clients), {"usual PyTorch": lambda: job.usual(g, clients)})
