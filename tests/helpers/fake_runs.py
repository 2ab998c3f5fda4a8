"""Runs of `fastagg sim` that never were."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import numpy as np


def fake(folder: Path, label: str, seed: int, *, final=0.9, rounds=12, clients=8, classes=10, participation=1.0,
         adaptive=True, personal=False, gamma=False, ideal=False, new=False, finished=True, training="batched",
         **options) -> Path:  # fmt: skip
    """A run's folder as run.py writes it, with curves that look real.

    ideal   with the distances of FedAWA's Fig. 3
    new     with what the first simulators did not record
    """
    rng = np.random.default_rng([seed, *label.encode()])
    data = np.random.default_rng(seed)
    counts = (data.dirichlet(np.full(classes, 0.15), clients) * data.integers(60, 600, (clients, 1))).astype(int)
    counts[:, 0] += 1
    unit = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    config = {"method": label, "options": {}, "data": "digits", "partition": "dirichlet", "alpha": 0.1,
              "clients": clients, "participation": participation, "model": "mlp", "rounds": rounds, "epochs": 3,
              "lr": 0.05, "seed": seed} | options  # fmt: skip
    metrics, drift = [], rng.normal(0, 0.4, clients)
    for r in range(rounds + 1):
        accuracy = 0.1 + (final - 0.1) * (1 - math.exp(-5 * r / rounds)) + rng.normal(0, 0.01) * (r > 0)
        loss = 2.3 * math.exp(-2 * r / rounds) + 0.2 + rng.normal(0, 0.02)
        m = {"round": r, "accuracy": None if personal else accuracy, "personal_accuracy": min(accuracy + 0.03, 1),
             "loss": None if personal else loss, "clients": [], "seconds": {}}  # fmt: skip
        if r:
            k = max(1, round(participation * clients))
            ids = sorted(rng.choice(clients, k, replace=False).tolist())
            n = counts[ids].sum(1)
            w = n * np.exp(drift[ids] * r / rounds + rng.normal(0, 0.1, k)) if adaptive else n
            seconds = {"train": rng.uniform(0.1, 0.13), "aggregate": 0.002, "evaluate": 0.012}
            m |= {"train_loss": 1.8 * math.exp(-3 * r / rounds) + 0.1, "lr": 0.05 * 0.99**r, "clients": ids,
                  "lost": [], "seconds": seconds,
                  "weights": None if personal else (w / w.sum()).tolist(), "norms": rng.uniform(1, 2, k).tolist(),
                  "coherence": 0.3 * math.exp(-2 * r / rounds) + rng.normal(0, 0.005),
                  "gamma": 1 - 0.1 * r / rounds if gamma else None}  # fmt: skip
            if new:
                fedavg_step = 2 * math.exp(-r / rounds) * rng.uniform(0.95, 1.05)
                shorter = 0.55 + rng.normal(0, 0.02) if adaptive else 1
                m |= {"step": None if personal else shorter * fedavg_step, "fedavg_step": fedavg_step,
                      "shrink_ratio": 19 + rng.normal(0, 1) if gamma else math.inf}  # fmt: skip
            if ideal:
                far = rng.uniform(0.5, 0.9, k)
                m |= {"ideal_clients": far.tolist(), "ideal_merged": 0.3 + 0.1 * r / rounds,
                      "ideal_method": 0.28 + 0.1 * r / rounds}  # fmt: skip
            if r in (1, (rounds + 1) // 2, rounds) and k > 1:
                noise = np.tril(rng.normal(0, 0.05, (k, k)), -1)
                cosine = np.clip(0.9 * unit[ids] @ unit[ids].T - 0.1 + noise + noise.T, -1, 1) / math.sqrt(r)
                np.fill_diagonal(cosine, 1)
                model = 0.98 + 0.005 * (noise + noise.T)
                np.fill_diagonal(model, 1)
                m |= {"cosine": cosine.tolist(), "model_cosine": model.tolist()}
            if r in (1, (rounds + 1) // 2, rounds) and new:
                seen = (counts[ids] / n[:, None]) * r / rounds + 1 / classes + rng.uniform(0, 0.02, (k, classes))
                m["heads"] = np.round(seen / seen.sum(1, keepdims=True), 4).tolist()
        metrics.append(m)
    last = [m["personal_accuracy" if personal else "accuracy"] for m in metrics[1:]][-5:]
    seconds = {p: sum(m["seconds"][p] for m in metrics[1:]) for p in ("train", "aggregate", "evaluate")}
    total = sum(seconds.values())
    summary = {"label": label, "method": label, "seed": seed, "rounds": rounds, "finished": finished,
               "personal": personal, "accuracy": statistics.mean(last), "accuracy_last": last[-1],
               "accuracy_best": max(last), "seconds": seconds | {"total": total},
               "rounds_per_second": rounds / total, "aggregation_share": seconds["aggregate"] / total,
               "training": training, "versions": {"fastagg": "0.1.0"}}  # fmt: skip
    partition = {"counts": counts.tolist(), "test_sizes": [5] * clients, "proxy": 100, "classes": classes}
    path = folder / f"{re.sub('[^a-z0-9]', '-', label)}-{seed}-{len(list(folder.glob('*')))}"
    path.mkdir(parents=True)
    for name, value in (("config", config), ("partition", partition), ("summary", summary)):
        (path / f"{name}.json").write_text(json.dumps(value))
    (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    return path
