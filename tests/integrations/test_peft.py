"""Adapters that PEFT itself makes, saves and loads: what fastagg takes for their updates is what PEFT adds."""

from __future__ import annotations

import pytest
import torch

import fastagg

pytestmark = pytest.mark.integration
peft = pytest.importorskip("peft", reason="peft is not installed")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(30, 16)
        self.conv = torch.nn.Conv1d(16, 12, 3, padding=1)
        self.up = torch.nn.Linear(12, 24)
        self.down = torch.nn.Linear(24, 12, bias=False)
        self.head = torch.nn.Linear(12, 5)

    def forward(self, x):
        h = self.conv(self.embed(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.down(torch.relu(self.up(h))).mean(1))


OPTIONS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"up": 3, "down": 6}, "alpha_pattern": {"down": 2, "conv": 20}},
    "biases": {"bias": "lora_only"},
}


def model_of(rank=4, **options):
    config = peft.LoraConfig(
        r=rank, lora_alpha=8, target_modules=["embed", "conv", "up", "down"], modules_to_save=["head"],
        init_lora_weights=False, **options,
    )  # fmt: skip
    return peft.get_peft_model(Net(), config)


def trained(model, seed, scale=0.1):
    """The same adapter, a little further on"""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model


def merged(model):
    """The whole model's weights with the adapter added, as PEFT does it: float64"""
    return {key: value.double() for key, value in model.merge_and_unload().state_dict().items()}


def clients_of(ranks, **options):
    return [trained(model_of(rank, **options), 10 + k) for k, rank in enumerate(ranks)]


def adapter_of(model):
    return fastagg.lora.Adapter(peft.get_peft_model_state_dict(model), model.peft_config["default"])


def with_adapter(folder):
    return peft.PeftModel.from_pretrained(Net(), folder)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("ranks", [(4, 4, 4), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("form", ["exact", "rank"])
def test_the_sum_is_what_peft_makes_of_it(options, ranks, form, tmp_path):
    if "rank_pattern" in options and ranks[0] != 4:
        pytest.skip("its ranks are given")
    clients = clients_of(ranks, **options)
    more = {"rank": 16} if form == "rank" else {}  # enough for all of it
    adapters = [adapter_of(c) for c in clients]
    result = fastagg.lora.aggregate(None, adapters, [1, 2, 5], method="fedavg", form=form, **more)
    result_path = fastagg.lora.save(result, tmp_path / "new").parent
    found = merged(with_adapter(result_path))
    each = [merged(c) for c in clients]
    for key, value in found.items():
        expected = sum(n / 8 * sd[key] for n, sd in zip((1, 2, 5), each, strict=True))
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_gram_is_that_of_what_peft_merges(options):
    start = model_of(**options)
    begin = {key: value.clone() for key, value in peft.get_peft_model_state_dict(start).items()}
    clients = clients_of((4, 4, 4), **options)
    for k, client in enumerate(clients):
        peft.set_peft_model_state_dict(client, begin)
        trained(client, 20 + k)
    g = fastagg.lora.Adapter(begin, start.peft_config["default"])
    gram = fastagg.lora.aggregate(g, [adapter_of(c) for c in clients], method="krum", f=0).gram
    center, each = merged(start), [merged(c) for c in clients]
    updates = [torch.cat([(sd[key] - center[key]).reshape(-1) for key in center]) for sd in each]
    expected = torch.stack([u @ v for u in updates for v in updates]).reshape(3, 3)
    torch.testing.assert_close(gram.updates(), expected, rtol=1e-4, atol=1e-4)


def test_folders_that_peft_has_saved(tmp_path):
    """One round of the command's own function: PEFT saves, fastagg aggregates, PEFT loads"""
    folders = []
    for k, client in enumerate(clients_of((4, 2, 8))):
        client.save_pretrained(tmp_path / f"c{k}")
        folders.append(tmp_path / f"c{k}")
    found = fastagg.aggregate_files("fedavg", None, folders, tmp_path / "new")
    assert found.config["r"] == 8
    result = fastagg.lora.aggregate(None, folders, method="fedavg")
    model = with_adapter(tmp_path / "new")
    for key, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(value, result[key]), key
    again = model_of(8)
    outcome = peft.set_peft_model_state_dict(again, result)
    assert not outcome.unexpected_keys


@pytest.mark.parametrize("targets", [(["up"], ["down", "conv"]), ("u.", "(down|conv)")], ids=str)
def test_clients_that_train_other_modules(targets, tmp_path):
    """The new adapter has the modules of all, and its config makes PEFT load them"""
    clients = []
    for k, names in enumerate(targets):
        config = peft.LoraConfig(r=4 - k, lora_alpha=8, target_modules=names, init_lora_weights=False)
        clients.append(trained(peft.get_peft_model(Net(), config), 30 + k))
    result = fastagg.lora.aggregate(None, [adapter_of(c) for c in clients], method="fedavg", partial=True)
    found = merged(with_adapter(fastagg.lora.save(result, tmp_path).parent))
    start, *each = ({key: v.double() for key, v in Net().state_dict().items()}, *map(merged, clients))
    for key, value in found.items():
        expected = start[key] + sum(sd[key] - start[key] for sd in each)  # of which one has moved
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more", [
    {"kasa_config": {}}, {"use_bdlora": {"target_modules_bd_a": ["up"], "nblocks": 2}}, {"monteclora_config": {}},
], ids=str)  # fmt: skip
def test_adapters_whose_update_is_another_are_refused(more):
    net = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["up"], **more))
    [name] = more
    with pytest.raises(fastagg.InputError, match=name):
        fastagg.lora.aggregate(None, [adapter_of(net)] * 2, method="fedavg")


def test_dora_is_refused():
    net = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["up"], use_dora=True))
    sd = peft.get_peft_model_state_dict(net)
    with pytest.raises(fastagg.InputError, match="the weights of DoRA are scaled"):
        fastagg.lora.aggregate(None, [sd, sd])
    with pytest.raises(fastagg.InputError, match="use_dora"):
        fastagg.lora.aggregate(None, [fastagg.lora.Adapter(sd, net.peft_config["default"])])


def test_the_state_dict_of_the_model_itself():
    """With the adapter's name in the keys, and frozen tensors beside it"""
    clients = clients_of((4, 4))
    sds = [{k: v for k, v in c.state_dict().items() if "lora_" in k} for c in clients]
    assert any(".default" in key for key in sds[0])
    found = fastagg.lora.aggregate(None, sds, method="fedavg")
    expected = fastagg.lora.aggregate(None, [peft.get_peft_model_state_dict(c) for c in clients], method="fedavg")
    for key, value in found.items():
        assert torch.equal(value, expected[key.replace(".default", "")])
