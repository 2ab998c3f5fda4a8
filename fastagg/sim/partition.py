"""Who has which samples: training data split over clients the way the papers do it.

    y --> proxy, kept by the server --> class sizes (samples, long_tail) --> counts [K, C] (kind) --> at least min_size
      --> indices per client --> test shares in the same proportions --> wrong labels of corrupted clients

A kind only decides how many samples of each class a client gets; which ones is chance. Every step draws from a random
stream of its own, so that corrupting clients, say, leaves the split as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fastagg._engine.checks import check_choice, check_integer, check_number
from fastagg.sim.choices import KINDS, PROXY_SPLITS

Split = Callable[[np.ndarray, int, np.random.Generator], Sequence[ArrayLike]]
BALANCED_ALPHA = 10.0  # of the balanced half of "hybrid": FedLAW, appendix D.2
PROXY_TAIL = 10.0  # how much commoner the first class is than the last in a long-tailed proxy set: FedLAW, Table 6


@dataclass(frozen=True)
class Partition:
    train: list[np.ndarray]  # per client, int64: indices into the training set, ascending, disjoint
    test: list[np.ndarray]  # per client, int64: indices into the test set, in the client's proportions; may overlap
    proxy: np.ndarray  # int64: training samples that the server keeps, of no client
    labels: np.ndarray  # [N] int64: the training labels as the clients see them
    counts: np.ndarray  # [K, C] int64: samples per client and true class
    held_out: list[np.ndarray]  # per client, as train: its samples that it does not train on; empty if train_share is 1


def make(
    y: ArrayLike,
    test_y: ArrayLike,
    classes: int,
    clients: int,
    *,
    kind: str | Split = "dirichlet",
    alpha: float = 0.1,
    classes_per_client: int = 2,
    min_size: int = 10,
    samples: int | None = None,
    long_tail: float = 1.0,
    corrupted: float = 0.0,
    proxy: int = 0,
    train_share: float = 1.0,
    proxy_split: str = "balanced",
    seed: int = 0,
    given: Sequence[np.ndarray] | None = None,
) -> Partition:
    """Splits a training set with labels y, and a test set with labels test_y, over clients.

    kind                one of KINDS, or a function of labels [N], clients and a NumPy generator that returns the
                        indices of each client's samples
    alpha               concentration of the Dirichlet distribution: small for clients that differ, large for alike
    classes_per_client  of kind "pathological"; with too few clients for all classes, some are left out
    min_size            least samples of a client; who has fewer gets some from those with most of the same classes
    samples             how many training samples the clients have together, classes in their proportions (None: all)
    long_tail           how much commoner the first class is than the last; exponential between (1: as in y)
    corrupted           fraction of the clients, rounded but at least one, that see two of their classes swapped
                        (FedLAW, Table 8; a pair for each: one for all would cost FedAvg more than the paper reports)
    proxy               how many training samples the server keeps: beside those of samples
    proxy_split         which, one of PROXY_SPLITS

    train_share         the part of its samples that a client trains on, the same in every round
    given               each client's samples, where they are not to be split: kind and what goes with it do not count

    Without classes (classes=0, regression), all samples are of one class, except for a function that splits: it gets
    the values. A client's test share is as large a part of
    the test set as its data is of all clients' data, at least min_size, and smaller where the test set has too few of a
    class to keep the proportions.
    """
    seen = np.asarray(y)  # what a function that splits is given
    if not classes:
        y, test_y, classes = np.zeros(len(np.asarray(y)), np.int64), np.zeros(len(np.asarray(test_y)), np.int64), 1
    if isinstance(kind, str):
        check_choice("partition", "kind", kind, tuple(KINDS))
    check_integer("partition", "classes", classes, 1)
    fewest = {"hybrid": 2, "groups": 3}.get(kind, 1) if isinstance(kind, str) else 1
    check_integer("partition", "clients", clients, fewest)
    check_number("partition", "train_share", train_share, 0, 1, strict=True)
    check_number("partition", "alpha", alpha, 1e-4, 1e6)
    check_integer("partition", "classes_per_client", classes_per_client, 1)
    check_integer("partition", "min_size", min_size, 1)
    check_integer("partition", "samples", 1 if samples is None else samples, 1)
    check_number("partition", "long_tail", long_tail, 1, 1e6)
    check_number("partition", "corrupted", corrupted, 0, 1)
    check_integer("partition", "proxy", proxy, 0)
    check_choice("partition", "proxy_split", proxy_split, tuple(PROXY_SPLITS))
    check_integer("partition", "seed", seed, 0)
    y, test_y = check_labels("y", y, classes), check_labels("test_y", test_y, classes)
    if proxy + clients * min_size > len(y):
        kept = f"proxy={proxy} and " if proxy else ""
        raise ValueError(
            f"partition: {kept}clients={clients} with min_size={min_size} need {proxy + clients * min_size} samples,"
            f" but the training set has {len(y)}"
        )

    streams = np.random.SeedSequence(int(seed)).spawn(5)
    choose, split, choose_test, corrupt, shorten = (np.random.default_rng(s) for s in streams)
    by_class, available = shuffled(y, classes, choose)
    kept = proxy_counts(proxy, proxy_split, available, choose)  # [C]
    n = class_sizes(available - kept, samples, long_tail)  # [C]
    if given is not None or not isinstance(kind, str):
        pools = [i[m : m + size] for i, m, size in zip(by_class, kept, n, strict=True)]
        train = chosen_by_user(given, kind, seen, np.sort(np.concatenate(pools)), clients, split)
    else:
        counts = at_least(min_size, deal(kind, n, clients, split, alpha, classes_per_client))  # [K, C]
        ends = kept + counts.cumsum(0)
        train = [
            np.sort(np.concatenate([i[e - m : e] for i, m, e in zip(by_class, *row, strict=True)]))
            for row in zip(counts, ends, strict=True)
        ]
    whole = train
    if train_share < 1:
        train = [np.sort(shorten.permutation(rows)[: max(1, round(train_share * len(rows)))]) for rows in train]
    counts = np.stack([np.bincount(y[rows], minlength=classes) for rows in train])
    return Partition(
        train=train,
        test=shares_of_test(test_y, counts, min_size, choose_test),
        proxy=proxy_rows(by_class, kept, proxy_split),
        labels=swapped(y, whole, counts, corrupted, corrupt),
        counts=counts,
        held_out=[np.setdiff1d(rows, used) for rows, used in zip(whole, train, strict=True)],
    )


def chosen_by_user(
    given: Sequence[np.ndarray] | None, split: Any, y: np.ndarray, pool: np.ndarray, clients: int, rng
) -> list[np.ndarray]:
    """The samples of each client as the user wants them, who splits `pool`, or has given them"""
    if given is not None:
        parts = given
        if len(parts) != clients:
            raise ValueError(f"partition: data of {len(parts)} clients were given, and clients={clients}")
        if len(pool) < len(y):
            raise ValueError(
                "partition: the clients' data were given as they are: leave out proxy, samples and long_tail"
            )
    else:
        found = split(y[pool].copy(), clients, rng)
        if isinstance(found, Mapping) or not isinstance(found, Iterable):
            raise ValueError(
                f"partition: the split returned a {type(found).__name__}; expected a list with the indices of each "
                "client's samples"
            )
        parts = [pool[indices_of(rows, k, len(pool))] for k, rows in enumerate(found)]
    train = [np.sort(np.asarray(rows, dtype=np.int64)) for rows in parts]
    if len(train) != clients:
        raise ValueError(f"partition: the split has {len(train)} clients, expected {clients}")
    for k, rows in enumerate(train):
        if not len(rows):
            raise ValueError(f"partition: client {k} has no samples")
    every = np.concatenate(train)
    if len(np.unique(every)) < len(every):
        raise ValueError("partition: a sample was given to two clients, or twice to one")
    return train


def indices_of(rows: Any, client: int, samples: int) -> np.ndarray:
    """What a user's split gives a client: indices, or a mask"""
    try:
        found = np.asarray(rows)
    except (ValueError, TypeError) as error:
        raise ValueError(f"partition: the split's entry of client {client} is no array: {error}") from error
    if found.dtype == bool and found.shape == (samples,):
        return np.flatnonzero(found)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(
            f"partition: the split's entry of client {client} is {found.dtype} of shape {found.shape}; expected "
            f"indices, integers from 0 to {samples - 1}"
        )
    for index in found[(found < 0) | (found >= samples)][:1]:
        raise ValueError(f"partition: the split gave client {client} sample {index}; expected 0 to {samples - 1}")
    return found.astype(np.int64)


def check_labels(name: str, labels: ArrayLike, classes: int) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"partition: {name} is {labels.dtype} of shape {labels.shape}; expected [N] integers")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"partition: {name} has labels from {labels.min()} to {labels.max()}; expected 0 to {classes - 1}"
        )
    return labels.astype(np.int64)


# Class sizes


def shuffled(labels: np.ndarray, classes: int, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """The indices of each class, and how many they are"""
    by_class = [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]
    return by_class, np.bincount(labels, minlength=classes)


def apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Integers in proportion to weights that sum to total, by largest remainder"""
    quota = total * (weights / weights.sum())
    got = np.floor(np.round(quota, 9)).astype(np.int64)  # rounded: 2.9999999999 is 3
    got[np.argsort(got - quota, kind="stable")[: total - got.sum()]] += 1
    return got


def balanced(total: int, available: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How many samples of each class make a set of that size, classes as equal as they can be"""
    got = np.zeros_like(available)
    while (need := total - got.sum()) > 0:
        free = rng.permutation(np.flatnonzero(got < available))[:need]
        got[free] = np.minimum(available[free], got[free] + need // len(free))
    return got


def proxy_counts(total: int, split: str, available: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How many samples of each class the server keeps; of a long tail fewer in all, as in FedLAW's code"""
    if split == "random":
        return rng.multivariate_hypergeometric(available, total) if total else np.zeros_like(available)
    got = balanced(total, available, rng)
    if split == "balanced":
        return got
    share = PROXY_TAIL ** -np.linspace(0, 1, len(available))
    return np.minimum(got, np.maximum(np.floor(np.round(total / len(available) * share, 9)), 1).astype(np.int64))


def proxy_rows(by_class: list[np.ndarray], kept: np.ndarray, split: str) -> np.ndarray:
    """The first so many of each class; "resampled": repeated until all have as many as the commonest"""
    size = np.where(kept > 0, kept.max(initial=0), 0) if split == "resampled" else kept
    return np.sort(np.concatenate([np.resize(i[:m], n) for i, m, n in zip(by_class, kept, size, strict=True)]))


def proxy_from_test(
    test_y: np.ndarray, classes: int, total: int, split: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Test samples that the server keeps, and those that are left for testing"""
    check_integer("partition", "proxy", total, 0)
    if total >= len(test_y):
        raise ValueError(
            f"partition: proxy={total} samples of the test set, which has {len(test_y)}: none is left to test"
        )
    rng = np.random.default_rng([int(seed), 1])
    by_class, available = shuffled(check_labels("test_y", test_y, classes), classes, rng)
    rows = proxy_rows(by_class, proxy_counts(total, split, available, rng), split)
    return rows, np.setdiff1d(np.arange(len(test_y)), rows)


def class_sizes(available: np.ndarray, samples: int | None, long_tail: float) -> np.ndarray:
    """How many samples of each class the clients have together"""
    if long_tail == 1:
        weights, most = available, int(available.sum())
    else:
        if not available.all():
            raise ValueError(f"partition: long_tail needs samples of every class; {available.argmin()} has none left")
        weights = float(long_tail) ** -np.linspace(0, 1, len(available))
        most = int((available / weights).min() * weights.sum() + 1e-6)
    if samples is not None and samples > most:
        tail = f" with long_tail={long_tail}" if long_tail != 1 else ""
        raise ValueError(f"partition: samples={samples}; expected at most {most}, what the training set has{tail}")
    return np.minimum(apportion(most if samples is None else samples, weights), available)


# Kinds: how many samples of each class each client gets, [K, C]


def deal(
    kind: str, n: np.ndarray, clients: int, rng: np.random.Generator, alpha: float, classes_per_client: int
) -> np.ndarray:
    match kind:
        case "iid":
            return iid(n, clients, rng)
        case "dirichlet":
            return dirichlet(n, clients, alpha, rng)
        case "pathological":
            return pathological(n, clients, classes_per_client, rng)
        case "hybrid":
            first = dirichlet(n, clients, BALANCED_ALPHA, rng)[: clients // 2]
            return np.concatenate([first, dirichlet(n - first.sum(0), clients - len(first), alpha, rng)])
        case "entropy":
            return entropy(n, clients, rng)
        case _:
            return groups(n, clients)


def iid(n: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    deck = rng.permutation(np.repeat(np.arange(len(n)), n))
    return np.stack([np.bincount(hand, minlength=len(n)) for hand in np.array_split(deck, clients)])


def dirichlet(n: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    share = rng.dirichlet(np.full(clients, float(alpha)), len(n))  # [C, K]
    ends = np.minimum(np.rint(share.cumsum(1) * n[:, None]).astype(np.int64), n[:, None])
    ends[:, -1] = n
    return np.diff(ends, axis=1, prepend=0).T


def pathological(n: np.ndarray, clients: int, each: int, rng: np.random.Generator) -> np.ndarray:
    """Clients choose in turn, at random among the classes chosen least: all classes are equally often held"""
    present = np.flatnonzero(n)
    if each > len(present):
        raise ValueError(
            f"partition: classes_per_client={each}; expected at most {len(present)}, the classes there are"
        )
    held = np.zeros((clients, len(n)), np.int64)
    for row in held:
        mixed = rng.permutation(present)
        row[mixed[np.argsort(held.sum(0)[mixed], kind="stable")[:each]]] = 1
    ends = held.cumsum(0) * n // np.maximum(held.sum(0), 1)
    return np.diff(ends, axis=0, prepend=0)


def entropy(n: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """A client's labels are (1 - t) of one class and t of all; t such that the entropies are evenly spaced.

    WeiAvg gives its clients equal sizes and spread entropies, skewed by a parameter p that it does not define.
    """
    present = int((n > 0).sum())
    low, high = np.zeros(clients), np.ones(clients)
    target = np.linspace(0, np.log(present), clients)
    for _ in range(50):
        t = (low + high) / 2
        main, other = 1 - t + t / present, t / present
        less = -main * np.log(main) - (present - 1) * other * np.log(other) < target
        low, high = np.where(less, t, low), np.where(less, high, t)
    left, size, counts = n.copy(), n.sum() // clients, []
    for t in high if present > 1 else np.zeros(clients):
        share = t * left / max(left.sum(), 1)
        share[rng.choice(np.flatnonzero(left == left.max()))] += 1 - t  # the commonest one, so that all are used up
        counts.append(take(size, share, left))
        left = left - counts[-1]
    return np.stack(counts)


def groups(n: np.ndarray, clients: int) -> np.ndarray:
    """Sizes as large as can be equal"""
    group = np.arange(clients) * 3 // clients  # [K]: 0, 1, 2
    first = np.arange(len(n)) < len(n) // 2
    halves = [np.where(first, n, 0), np.where(first, 0, n)]
    sums = [int(half.sum()) for half in halves]
    if 0 in sums:
        raise ValueError("partition: kind 'groups' needs samples in both halves of the classes")
    all_classes = (group == 2).sum()
    size = min(int(s / ((group == g).sum() + all_classes * s / n.sum()) + 1e-9) for g, s in enumerate(sums))
    left, counts = n.copy(), []
    for g in group:
        counts.append(take(size, (*halves, n)[g].astype(float), left))
        left = left - counts[-1]
    return np.stack(counts)


def take(size: int, share: np.ndarray, left: np.ndarray) -> np.ndarray:
    """So many samples in proportions share, [C]; what a class lacks comes from others of share, then from any"""
    got = np.minimum(apportion(size, share), left)
    for allowed in (share > 0, share >= 0):
        spare = np.where(allowed, left - got, 0)
        if (more := min(size - got.sum(), spare.sum())) > 0:
            got = got + np.minimum(apportion(more, spare), spare)
    return got


def label_entropies(counts: np.ndarray) -> np.ndarray:
    """Of each row's shares, in nats"""
    p = counts / counts.sum(1, keepdims=True)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(1)


def at_least(min_size: int, counts: np.ndarray) -> np.ndarray:
    """Counts in which no client has fewer: samples move to it from who has most of one of its classes and can spare"""
    counts, total = counts.copy(), counts.sum()
    if total < min_size * len(counts):
        raise ValueError(
            f"partition: clients={len(counts)} with min_size={min_size} need {min_size * len(counts)} samples, but"
            f" samples, long_tail and kind leave {total}"
        )
    for k in range(len(counts)):
        while (need := min_size - counts[k].sum()) > 0:
            spare = np.maximum(counts.sum(1) - min_size, 0)  # [K]
            for allowed, kept in ((counts[k] > 0, 1), (counts[k] > 0, 0), (True, 0)):  # the giver keeps its classes too
                gifts = np.where(allowed, np.minimum(counts - kept, spare[:, None]), 0)  # [K, C]
                if gifts.max() > 0:
                    break
            giver, c = np.unravel_index(gifts.argmax(), gifts.shape)
            moved = min(need, gifts[giver, c])
            counts[giver, c] -= moved
            counts[k, c] += moved
    return counts


# Test shares and wrong labels


def shares_of_test(test_y: np.ndarray, counts: np.ndarray, least: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Clients walk along each class's shuffled samples, and start again at its end: they share as few as can be"""
    by_class, have = shuffled(test_y, counts.shape[1], rng)
    starts, shares = np.zeros_like(have), []
    for row in counts:
        share = np.where(have > 0, row, 0)
        size = max(least, round(row.sum() * len(test_y) / counts.sum()))
        fits = min((h * share.sum() // s for h, s in zip(have, share, strict=True) if s), default=0)
        got = np.minimum(apportion(min(size, fits), share), have) if fits else np.zeros_like(have)
        picked = [i[(s + np.arange(m)) % max(len(i), 1)] for i, s, m in zip(by_class, starts, got, strict=True)]
        shares.append(np.sort(np.concatenate(picked)))
        starts = starts + got
    return shares


def swapped(
    y: np.ndarray, parts: list[np.ndarray], counts: np.ndarray, corrupted: float, rng: np.random.Generator
) -> np.ndarray:
    """Labels in which, for each corrupted client, two of its classes are exchanged (if it has one, that and any)"""
    labels = y.copy()
    number = max(1, int(corrupted * len(parts) + 0.5)) if corrupted > 0 else 0
    for k in rng.permutation(len(parts))[:number]:
        own, foreign = (rng.permutation(np.flatnonzero(mask)) for mask in (counts[k] > 0, counts[k] == 0))
        a, b = np.concatenate([own, foreign])[:2]
        mine = y[parts[k]]
        labels[parts[k]] = np.where(mine == a, b, np.where(mine == b, a, mine))
    return labels
