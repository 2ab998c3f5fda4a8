"""The names that options of a run can have. Without torch, so that `fastagg sim --help` can print them at once."""

from __future__ import annotations

ATTACKS = ("none", "noise", "flip", "scale", "alie", "ipm", "min-max", "min-sum", "labels", "backdoor")
# Defaults; min-max and min-sum find the largest that there is, alie finds the paper's
ATTACK_STRENGTHS = {"noise": 10.0, "flip": 10.0, "scale": 10.0, "ipm": 0.5, "labels": 1.0, "backdoor": 1.0}
ATTACKS_WITHOUT_STRENGTH = ("min-max", "min-sum")
ATTACK_KNOWS = ("honest", "own")
ATTACK_DIRECTIONS = ("unit", "std", "sign")
DATASETS = (
    "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet", "usps", "svhn", "syn", "ag-news",
    "sogou-news", "domain-digits",
)  # fmt: skip
# "standard": mean 0 and deviation 1 in each channel of the training set; "unit": from 0 to 1, as they are; "half": from
# -1 to 1, (x - 0.5) / 0.5 (FedAWA's CIFAR)
PIXELS = ("standard", "unit", "half")
PROXY_FROM = ("train", "test")
PROXY_SPLITS = {
    "balanced": "as many samples of every class",
    "long-tailed": "ten times as many samples of the first class as of the last, fewer in all (FedLAW, Table 6)",
    "resampled": "long-tailed, with the samples of rare classes repeated until classes are balanced",
    "random": "as they come",
}
MODELS = (
    "mlp", "lenet", "cnn", "cnn4", "alexnet", "resnet8", "resnet20", "resnet56", "resnet110", "wrn56-4", "resnet18",
    "densenet121", "vit", "embedding",
)  # fmt: skip
KINDS = {
    "iid": "samples dealt at random, equal sizes",
    "dirichlet": "each class divided over the clients by Dirichlet(alpha): unequal mixtures and sizes",
    "pathological": "classes_per_client classes each; a class is divided equally over those who have it",
    "hybrid": "half of the clients balanced, Dirichlet(10); the others share the rest by Dirichlet(alpha) (FedLAW)",
    "entropy": "equal sizes; label entropy rises evenly from the first client, one class, to the last, all (WeiAvg)",
    "groups": "equal sizes; a third has the first half of the classes, a third the second, a third all (FedAWA)",
}
