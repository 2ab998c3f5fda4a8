"""A simulated training, round by round: choose clients, train them, aggregate, evaluate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import fastagg
from fastagg._engine.distributed.peers import Peers
from fastagg.sim import attack, data, models, ranks, supplied
from fastagg.sim.attack.data import Backdoor, flipped
from fastagg.sim.config import Config, check_combination, options_of_the_model
from fastagg.sim.devices import device_of
from fastagg.sim.divide import divided
from fastagg.sim.events import Events
from fastagg.sim.events import is_wanted as wants_events
from fastagg.sim.ideal import Ideal
from fastagg.sim.ideal import why_not as why_no_ideal
from fastagg.sim.objects import Own
from fastagg.sim.observe import class_norms, observed, shows_clients
from fastagg.sim.outcomes import Outcomes, check_measures, outcomes, usual_loss
from fastagg.sim.pace import Pace, speeds_of
from fastagg.sim.stopwatch import Stopwatch
from fastagg.sim.train import Job, Trainer, Update

# What a random number is for: every draw has a generator of its own, from the seed, this, the round and the client, so
# that a run that is continued draws what an undisturbed one would have drawn.
SELECTION, DROPOUT, STRAGGLING, BATCHES, ATTACKERS, NOISE, MODELS, TRIGGERS, IDEAL, SPEEDS = range(10)


class Simulation:
    """The state of a run, and its next round. One model for all, one for each client, or one for each cluster.

    peers   the processes that share the work; each has this object, and all models
    """

    def __init__(
        self, options: Config, dataset: data.Dataset | None = None, peers: Peers | None = None, own: Own | None = None
    ) -> None:
        self.options, self.peers = options, peers
        o, own = options, own or Own()
        device_of(o.device)  # before data are read, which may take a while
        self.data, self.parts, self.proxy = divided(o, own, dataset)
        d = self.data
        cls = own.aggregator_class(o)
        o.check_method(cls)
        self.module = models.make(own.get(o, "model"), tuple(d.x.shape[1:]), d.classes, o.seed, d.vocabulary)
        self.head = models.head_of(self.module, d.classes)
        if o.wdr or options_of_the_model(cls, "head"):
            self.head = models.needed_head(self.module, d.classes, o.method)
        if o.loss is None and d.classes:
            models.check_outputs(self.module, d.x, d.classes)
        self.labels = torch.from_numpy(self.parts.labels) if d.classes else d.y  # as the clients see them
        self.attack = own.get(o, "attack")
        self.attackers = attack.choose(o.clients, o.attackers, self.draw(ATTACKERS))
        self.backdoor = Backdoor(d, o.attack_target) if o.attack == "backdoor" else None
        self.x = d.x  # as the clients see them, too
        self.poison()
        local = replace(o.local, algorithm=own.get(o, "algorithm"), loss=own.get(o, "loss"))
        self.metric = own.get(o, "metric")
        if local.loss is not None or self.metric is not None or not d.classes:
            check_measures(self.module, d.x, d.y, local.loss or usual_loss(d.y), self.metric)
        self.trainer = Trainer(self.module, self.x, self.labels, local, head=self.head, batched=o.batched)
        check_combination(self.trainer.algorithm, o.method, cls.produces)
        by_role = {"module": self.module, "head": self.head, "lr": o.lr, "loss": self.server_loss(), "progress": False}
        set_here = {name: by_role[role] for name, role in options_of_the_model(cls, *by_role).items()}
        self.server: Any = cls(**(set_here | o.options))
        self.server.gram = "full"  # the record of a run shows how similar the clients are
        inputs = supplied.needed(self)
        if peers is not None:
            ranks.check(o, self.trainer.algorithm, self.server, dict.fromkeys(inputs, ()))
            self.server.group = peers.group
        if o.ideal and (why := why_no_ideal(self.server.produces, peers is not None)):
            raise ValueError(f"sim: ideal=true cannot be had here: {why}; leave it out")
        self.ideal = Ideal(self, local) if o.ideal else None
        self.round = 0
        self.models = [self.first_state(self.module)]
        if self.server.produces == "clusters":  # as many as the method begins with, different from each other
            seeds = [int(self.draw(MODELS, i).integers(2**31)) for i in range(1, self.server.first_models)]
            forms = own.get(o, "model"), tuple(d.x.shape[1:]), d.classes
            self.models += [self.first_state(models.make(*forms, seed, d.vocabulary)) for seed in seeds]
        self.model_of = [0] * o.clients  # which of the models each client has
        self.parameters = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.memory: dict[int, dict[str, torch.Tensor]] = {}  # of clients, by what the algorithm has them remember
        self.momentum: dict[int, dict[str, torch.Tensor]] = {}  # of clients, with keep_momentum
        self.shared = self.trainer.algorithm.shared(self.models[0], self.parameters)  # what all clients are told
        self.choose_models(range(o.clients))
        speeds = speeds_of(o.speeds, o.clients, self.draw(SPEEDS))
        self.pace = Pace(speeds, self.sizes(list(range(o.clients))), o.epochs)  # of a run with a clock
        self.events = Events(self) if wants_events(self) else None

    def first_state(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {key: value.detach().clone().to(self.options.device) for key, value in module.state_dict().items()}

    def server_loss(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """What the server minimises on samples of its own; None: a method's default, cross-entropy"""
        if self.options.loss is None and self.data.classes:
            return None
        return lambda outputs, y: self.trainer.loss(outputs, y).mean()

    def poison(self) -> None:
        """The data of attackers become what they train on"""
        o, rows = self.options, [self.parts.train[k] for k in self.attackers]
        if o.attack == "labels":
            self.labels = flipped(self.labels, rows, self.data)
        elif self.backdoor is not None:
            rngs = [self.draw(TRIGGERS, k) for k in self.attackers]
            self.x, self.labels = self.backdoor.poisoned(self.labels, rows, o.attack_share, rngs)

    @property
    def personal(self) -> bool:
        return self.server.produces != "global"

    def next_round(self) -> dict[str, Any]:
        """Trains and aggregates once; returns what is recorded of it"""
        if self.events is not None:
            return self.events.next_round()
        r, clock = self.round + 1, Stopwatch()
        invited, lr = self.chosen(r), self.lr(r)
        present = [k for k in invited if not self.lost(r, k)] or invited[:1]
        self.choose_models(present)
        jobs = [self.job(r, k) for k in present]
        self.pace.wait_for((k, self.job(r, k).epochs) for k in invited)  # also for those who will send nothing
        with clock("train"):
            updates = self.trained(r, jobs, lr) if self.peers is None else ranks.train(
                self.peers, jobs, lambda some: self.trained(r, some, lr)
            )  # fmt: skip
        with clock("aggregate"):
            result, before = self.aggregate(present, updates)
        self.round = r
        if not self.first:
            return {"round": r}
        here = [i for i, k in enumerate(present) if k not in getattr(result, "dropped", ())]
        present, updates = [present[i] for i in here], [updates[i] for i in here]  # what is recorded is of these
        record = {
            "round": r, "lr": lr, **self.times, "clients": present, "lost": sorted(set(invited) - set(present)),
            "train_loss": float(np.average([u.loss for u in updates], weights=self.sizes(present))),
        }  # fmt: skip
        with clock("evaluate"):
            record |= observed(self, result, before, present, updates, here) | self.evaluated()
        if self.ideal is not None:
            seed = int(self.draw(IDEAL, r).integers(2**31))
            record |= self.ideal.observed(self, before, present, updates, lr, seed)
        return record | {"seconds": clock.seconds}

    def lr(self, r: int) -> float:
        return self.options.lr * self.options.lr_decay ** (r - 1)

    def lost(self, turn: int, client: int) -> bool:
        """It trains and sends nothing"""
        return self.draw(DROPOUT, turn, client).random() < self.options.dropout

    @property
    def is_over(self) -> bool:
        return self.round >= self.options.rounds or self.pace.time >= (self.options.until or float("inf"))

    @property
    def times(self) -> dict[str, float]:
        """What is recorded of simulated time, if the run has a clock"""
        return {"time": self.pace.time} if self.options.clock or self.options.speeds else {}

    @property
    def first(self) -> bool:
        """This process evaluates and records"""
        return self.peers is None or self.peers.rank == 0

    def trained(self, r: int, jobs: list[Job], lr: float) -> list[Update]:
        updates = self.trainer.train(jobs, lr)
        if self.attackers:
            updates = self.sent(r, jobs, updates)
            attack.check_size(update.model for update in updates)
        if self.head and self.data.classes and shows_clients(self.options, r):
            updates = [replace(update, heads=class_norms(update.model[self.head])) for update in updates]
        return updates

    def chosen(self, r: int) -> list[int]:
        """The clients invited in round r"""
        o = self.options
        count = max(1, round(o.participation * o.clients))
        if o.selection == "random":
            return sorted(self.draw(SELECTION, r).choice(o.clients, count, replace=False).tolist())
        windows = -(
            -o.clients // count
        )  # all clients take part before one does again, in an order drawn anew each time
        order = self.draw(SELECTION, (r - 1) // windows).permutation(o.clients)
        at = (r - 1) % windows * count
        return sorted(order[at : at + count].tolist())

    def draw(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.options.seed, *purpose])

    def job(self, r: int, k: int) -> Job:
        o, rng = self.options, self.draw(STRAGGLING, r, k)
        late = rng.random() < o.stragglers and o.epochs > 1
        epochs = int(rng.integers(1, o.epochs)) if late else o.epochs
        return Job(
            client=k, start=self.models[self.model_of[k]], indices=self.parts.train[k],
            seed=int(self.draw(BATCHES, r, k).integers(2**31)), epochs=epochs,
            class_dist=self.parts.counts[k] if o.wdr else None, memory=self.memory.get(k), shared=self.shared,
            momentum=self.momentum.get(k), round=r,
        )  # fmt: skip

    def sent(self, r: int, jobs: list[Job], updates: list[Update]) -> list[Update]:
        """What the server gets of the clients, of whom some are malicious"""
        o, attackers = self.options, [i for i, job in enumerate(jobs) if job.client in self.attackers]
        if not attackers:
            return updates
        models = attack.sent(
            self.attack, [job.start for job in jobs], [update.model for update in updates], attackers,
            [name for name, _ in self.module.named_parameters()], knows=o.attack_knows, strength=o.strength,
            direction=o.attack_direction, rngs=[self.draw(NOISE, r, jobs[i].client) for i in attackers],
        )  # fmt: skip
        return [replace(update, state=models.get(i, update.state)) for i, update in enumerate(updates)]

    def sizes(self, clients: list[int]) -> list[int]:
        return [len(self.parts.train[k]) for k in clients]

    def aggregate(self, present: list[int], updates: list[Update]) -> tuple[Any, dict[str, torch.Tensor]]:
        """The method's result, and the model that updates are measured from"""
        if self.server.produces == "clusters":
            return self.aggregate_clusters(present, updates)
        starts = [self.models[self.model_of[k]] for k in present]
        with warnings.catch_warnings():  # those who have not trained yet have one model together
            warnings.filterwarnings("ignore", ".* are the same tensors")
            before = starts[0] if not self.personal else dict(fastagg.fedavg(None, starts))
        result = self.merged(before, present, updates, supplied.round_inputs(self, present, updates))
        if self.personal:
            if len(self.models) == 1:  # from now on each client has its own
                self.models, self.model_of = self.models * self.options.clients, list(range(self.options.clients))
            for k, model in zip(present, result, strict=True):
                if model is not None:  # a client that was dropped keeps its model
                    self.models[k] = dict(model)
        else:
            self.models = [dict(result)]
        kept = [(k, u) for k, u in zip(present, updates, strict=True) if k not in result.dropped]
        self.remember(kept)
        if self.trainer.algorithm.corrects:
            states, sent = [u.model for _, u in kept], [u.sent or {} for _, u in kept]
            model, self.shared = self.trainer.algorithm.server(
                self.models[0], before, states, sent, self.shared, self.options.clients
            )
            self.models = [model]
        return result, before

    def remember(self, kept: list[tuple[int, Update]]) -> None:
        """A client whose update was not used goes on as if it had not taken part"""
        self.memory |= {k: u.memory for k, u in kept if u.memory is not None}
        self.momentum |= {k: u.momentum for k, u in kept if u.momentum is not None}

    def forget(self, client: int) -> None:
        self.memory.pop(client, None)
        self.momentum.pop(client, None)

    def aggregate_clusters(self, present: list[int], updates: list[Update]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Each cluster on its own, from its own model; a cluster may come out as two"""
        result, before = None, self.models[self.model_of[present[0]]]
        for number in sorted({self.model_of[k] for k in present}):
            here = [i for i, k in enumerate(present) if self.model_of[k] == number]
            ids, model = [present[i] for i in here], self.models[number]
            mine = [updates[i] for i in here]
            result = self.merged(model, ids, mine, supplied.round_inputs(self, ids, mine))
            self.remember([(k, u) for k, u in zip(ids, mine, strict=True) if k not in result.dropped])
            for n, (members, new) in enumerate(zip(result.clusters, result, strict=True)):
                place = number if n == 0 else len(self.models)
                self.models[place:] = [dict(new), *self.models[place + 1 :]]
                for k in members:
                    self.model_of[k] = place
        return (result if len(self.models) == 1 else None), before

    def merged(self, before: dict[str, torch.Tensor], ids: list[int], updates: list[Update], info: dict) -> Any:
        server = self.server  # of which FedAvg needs a global model for a server_lr, and weighs as ever
        by_size_alone = server.reads == "weights" and not server.round_inputs and not type(server).needs_global
        plain = self.trainer.algorithm.equal and by_size_alone
        sizes = [1] * len(ids) if plain else self.sizes(ids)
        if self.peers is not None:
            return ranks.aggregate(self.peers, self.server, before, ids, sizes, updates, info)
        return self.server.aggregate(before, [u.model for u in updates], sizes, client_ids=ids, **info)

    def choose_models(self, clients: Sequence[int]) -> None:
        """Each of these takes the model with the least loss on its data, if it is for clients to choose (IFCA)"""
        if any(spec.kind == "choices" for spec in self.server.round_inputs):
            best = np.argmin([supplied.losses(self, model, clients) for model in self.models], axis=0)
            for k, number in zip(clients, best.tolist(), strict=True):
                self.model_of[k] = number

    def evaluated(self) -> dict[str, Any]:
        """On the whole test set where there is one model, and on every client's share of it with the client's model"""
        x, y, shares = self.data.test_x, self.data.test_y, self.parts.test
        if len(self.models) == 1:
            seen = self.outcomes(self.models[0], x, y)
            accuracy, loss = seen.of()
            own = [seen.of(rows)[0] for rows in shares if len(rows)]
            return {"accuracy": accuracy, "personal_accuracy": mean(own), "loss": loss} | self.attack_success()
        own = []
        for k, rows in enumerate(shares):
            if len(rows):
                own.append(self.outcomes(self.models[self.model_of[k]], x[rows], y[rows]).of()[0])
        return {"accuracy": None, "personal_accuracy": mean(own), "loss": None} | self.attack_success()

    def attack_success(self) -> dict[str, Any]:
        """Of a backdoor: the part of the test images of other classes that are taken for the target once they have the
        trigger. With several models, the mean over honest clients, each on its share of the test set."""
        if self.backdoor is None:
            return {}
        door, x, y = self.backdoor, self.data.test_x, self.data.test_y
        tested = [(self.models[0], door.others)]
        if len(self.models) > 1:
            honest = [k for k in range(self.options.clients) if k not in self.attackers]
            tested = [(self.models[self.model_of[k]], np.intersect1d(self.parts.test[k], door.others)) for k in honest]
        rates = [door.success(self.outcomes(m, door.on(x[rows]), y[rows]).outputs) for m, rows in tested if len(rows)]
        return {"attack_success": mean(rates)}

    def outcomes(self, model: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Outcomes:
        return outcomes(
            self.module, model, x, y, loss=self.trainer.loss, metric=self.metric, precision=self.options.precision
        )

    def state_dict(self) -> dict[str, Any]:
        """To be called by all processes that share the work"""
        server = self.server.state_dict()
        return {
            "round": self.round, "models": self.models if len(self.models) == 1 else list(self.models),
            "model_of": self.model_of, "memory": {str(k): v for k, v in self.memory.items()},
            "momentum": {str(k): v for k, v in self.momentum.items()}, "shared": self.shared,
            "server": server if self.peers is None else ranks.whole_state(self.peers, server, self.models[0]),
            **self.times, **({} if self.events is None else {"events": self.events.state_dict()}),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = {"round", "models", "model_of", "memory", "momentum", "shared", "server", *self.times}
        names |= set() if self.events is None else {"events"}
        for missing in names - (state.keys() if isinstance(state, dict) else set()):
            raise ValueError(f"sim: the checkpoint has no {missing!r}; it is not one of a run")
        models, model_of, r = state["models"], state["model_of"], state["round"]
        memory, momentum = ({int(k): v for k, v in state[name].items()} for name in ("memory", "momentum"))
        params = {name: self.models[0][name] for name in self.parameters}
        remembered = self.trainer.algorithm.memory(self.models[0], self.parameters)  # {}: anything may be
        if not models or not all(same_form(m, self.models[0]) for m in models):
            raise ValueError("its models are not of the run's form")
        if (
            not all(same_form(m, remembered) if remembered else is_state(m) for m in memory.values())
            or not all(same_form(m, params) for m in momentum.values())
            or not (same_form(state["shared"], self.shared) if self.shared else is_state(state["shared"]))
        ):
            raise ValueError("what it remembers of clients is not of the model's form")
        if len(model_of) != self.options.clients or not set(model_of) <= set(range(len(models))):
            raise ValueError("it does not say which model each client has")
        if not isinstance(r, int) or isinstance(r, bool) or r < 0:
            raise ValueError(f"round={r!r}")
        server = state["server"]
        self.server.load_state_dict(
            server if self.peers is None else ranks.part_of_state(self.peers, server, self.models[0])
        )
        here = lambda sd: {key: value.to(self.options.device) for key, value in sd.items()}  # noqa: E731
        self.round, self.models, self.model_of = r, [here(m) for m in models], model_of
        self.memory, self.momentum = ({k: here(sd) for k, sd in kept.items()} for kept in (memory, momentum))
        self.shared = here(state["shared"])
        self.pace.time = state.get("time", 0.0)
        if self.events is not None:
            self.events.load_state_dict(state["events"])


def same_form(a: Any, b: dict[str, torch.Tensor]) -> bool:
    """Whether both are tensors of the same names, shapes and dtypes"""
    form = lambda sd: {key: (value.shape, value.dtype) for key, value in sd.items()}  # noqa: E731
    return is_state(a) and form(a) == form(b)


def is_state(a: Any) -> bool:
    return isinstance(a, dict) and all(isinstance(value, torch.Tensor) for value in a.values())


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
