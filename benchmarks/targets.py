"""What we want every kernel to reach, and whether it did."""

from __future__ import annotations

from benchmarks.records import FRESH, Record, find, in_ms


def aims(records: list[Record]) -> tuple:
    """Our targets, and whether the measurements reach them"""
    rows = []

    def row(job: str, record: Record | None, limit_ms, words: str, who: str | None = None) -> None:
        if record is None:
            return
        value, best = record.median(who), record["ms"][who or record["job"]]["best"]
        best_roof = max(record["ms"][floor]["best"] for floor in ("R", "F") if floor in record["ms"])
        limit = limit_ms(record)
        verdict = "reached" if value <= limit else f"missed by {100 * (value / limit - 1):.0f} %"
        rows.append([f"{job}, {record.where}", in_ms(value), f"{value / record.median('R'):.2f}",
                     f"{value / record.roof:.2f}", in_ms(best), f"{best / best_roof:.2f}", words, verdict])  # fmt: skip

    bf16 = ("resnet18", 20, "bfloat16")
    fp32_mix, fp32_gram = find(records, "fedavg"), find(records, "gram")
    for K in (5, 20, 100):
        row("fedavg, out=", find(records, "fedavg", ("resnet18", K, "float32")), lambda r: 1.3 * r.median("R"), "1.3 R")
    row("fedavg, fresh output", fp32_mix, lambda r: 1.75 * r.median("R"), "1.75 R", FRESH)
    row("gram", fp32_gram, lambda r: 1.5 * r.roof, "1.5 roofs")
    row("gram_mix", find(records, "gram_mix"), lambda r: 1.9 * r.roof, "1.9 roofs")
    row("gram", find(records, "gram", ("resnet18", 100, "float32")), lambda r: r.median("F") / 0.75, "75 % of the peak")
    row("fedawa released", find(records, "fedawa_released"), lambda r: 1.9 * r.roof, "1.9 roofs")
    two_reads = lambda r: 1.6 * r.roof + 1.4 * r.median("R")  # noqa: E731
    row("fedawa (paper)", find(records, "fedawa"), two_reads, "1.6 roofs + 1.4 R")
    row("fedawa layerwise (paper)", find(records, "fedawa_layerwise"), two_reads, "1.6 roofs + 1.4 R")
    row("fedawa paper, 100 steps", find(records, "fedawa_paper", steps=100), two_reads, "1.6 roofs + 1.4 R")
    if fp32_mix and fp32_gram:
        row("fedavg", find(records, "fedavg", bf16), lambda r: 0.6 * fp32_mix.median(), "0.6 of float32")
        row("gram", find(records, "gram", bf16), lambda r: fp32_gram.median(), "float32's time")
    row("fedawa released", find(records, "fedawa_released", ("resnet20", 20, "float32")),
        lambda r: r.median("torch._foreach_ FedAvg"), "torch._foreach_ FedAvg")  # fmt: skip
    row("fedavg, out=", find(records, "fedavg", ("lora", 20, "float32")), lambda r: 1.6 * r.median("R"), "1.6 R")
    row("gram", find(records, "gram", ("in_cache", 100, "float32")),
        lambda r: r.median("F") * (100 * 101) / (101 * 102) / 0.6, "60 % of the peak")  # fmt: skip
    for cohort, bar in ((("mlp_6m", 100, "float32"), 4.0), (("mlp_half", 1000, "float32"), 5.5)):
        row("fedawa released", find(records, "many_fedawa_released", cohort), lambda r, bar=bar: bar * r.median("R"),
            f"{bar} R")  # fmt: skip
    for name in ("weiavg", "ldawa", "fedadp", "simagg"):
        row(name, find(records, f"many_{name}", ("mlp_6m", 100, "float32")), lambda r: 4.0 * r.median("R"), "4 R")
    few, many = (find(records, "over_k_fedawa_released", ("mlp_1m", K, "float32")) for K in (100, 400))
    if few and many:
        row("fedawa released", many, lambda r: 4.4 * few.median(), "4.4 times 100 clients")
    for name in ("median", "trimmed_mean"):
        row(f"{name}, out=", find(records, name), lambda r: 2.5 * r.median("R"), "2.5 R")
        row(f"{name}, out=", find(records, name, ("resnet18", 100, "float32")), lambda r: 5 * r.median("R"), "5 R")
        row(f"{name}, out=", find(records, name), lambda r: r.median("torch.sort") / 15, "a 15th of torch.sort")
    foreach = lambda share: lambda r: share * r.median("torch._foreach_ FedAvg")  # noqa: E731
    small = ("resnet20", 20, "float32")
    row("fedavg, out=", find(records, "fedavg", small), lambda r: 0.45 * r.median("torch._foreach_"),
        "0.45 torch._foreach_")  # fmt: skip
    row("fedawa (paper)", find(records, "fedawa", small), foreach(0.8), "0.8 torch._foreach_ FedAvg")
    headings = ["job", "median", "in R", "in roofs", "best round", "in best roofs", "target, at most", "result"]
    return "Targets", headings, rows, "Medians are compared with the targets."
