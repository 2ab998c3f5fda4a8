"""Server optimisers (Reddi et al., Alg. 5): the clients' mean update is the gradient of an optimiser on the server.

    delta = sum_k n_k d_k
    FedAvgM      m = momentum m + delta,                              x = g + lr m
      nesterov   the same m,                                          x = g + lr (delta + momentum m)
    the others   m = beta1 m + (1 - beta1) delta,                     x = g + lr m / (sqrt(v) + tau)
    FedAdam      v = beta2 v + (1 - beta2) delta^2
    FedYogi      v = v - (1 - beta2) delta^2 sign(v - delta^2)
    FedAdagrad   v = v + delta^2

with m = 0 and v = tau^2 at the start, and no bias correction. With weights="fedawa", or another method, delta is what
that method's aggregate adds to the global model. On BatchNorm's running statistics such steps would give
negative variances, so whatever is not a parameter is plainly averaged.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

import torch

from fastagg.extend import Range, register
from fastagg.methods.server_optimiser import ServerOptimiser

LearningRate = Annotated[float, Range(above=0, high=1e30)]  # float32 holds no 1e300
Decay = Annotated[float, Range(0, below=1)]


@register
class FedAvgM(ServerOptimiser):
    """FedAvg with momentum on the server: m = momentum m + sum_k n_k d_k, the new model is g + lr m.

    lr          server learning rate; lr=1 with momentum=0 is FedAvg
    momentum    the fraction of m that is kept from one round to the next
    nesterov    Nesterov's momentum, as torch.optim.SGD has it: the new model is g + lr (sum_k n_k d_k + momentum m).
                DiLoCo's outer optimiser (Douillard et al., 2023), with lr=0.7 and momentum=0.9
    weights     the method that computes the clients' weights: its name, {"method": name, option: value}, or an
                aggregator; the step is then taken from its aggregate. Default: the data shares

    Only parameters take such steps; buffers become what the method of the weights makes of them, by default their mean.
    """

    name = "fedavgm"
    paper = "Hsu et al., 2019"
    moments = ("m",)

    lr: LearningRate = 1.0
    momentum: Decay = 0.9
    nesterov: bool = False

    def _is_fedavg(self) -> bool:
        return self.lr == 1 and self.momentum == 0

    def _step(self, delta: torch.Tensor, m: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, float]:
        m = torch.add(delta, m, alpha=self.momentum)
        return [m], torch.add(delta, m, alpha=self.momentum) if self.nesterov else m, self.lr


class _Adaptive(ServerOptimiser):
    """Steps of m / (sqrt(v) + tau)"""

    lr: LearningRate = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: Annotated[float, Range(1e-18, 1e18)] = 1e-3  # its square has to fit into float32

    def start_of(self, moment: str) -> float:
        return self.tau**2 if moment == "v" else 0.0

    def _step(
        self, delta: torch.Tensor, m: torch.Tensor, v: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, float]:
        m = torch.mul(m, self.beta1).add_(delta, alpha=1 - self.beta1)
        v = self._second(delta, v)
        step = v.sqrt().add_(self.tau)
        return [m, v], torch.div(m, step, out=step), self.lr

    def _second(self, delta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@register
class FedAdam(_Adaptive):
    """Adam on the server, with the mean client update as its gradient.

    lr          server learning rate; the paper tunes it, and so should you
    beta1       decay of the mean update m
    beta2       decay of its mean square v
    tau         adaptivity: added to sqrt(v), which starts at tau; a small tau makes the steps of all elements similar
    weights     the method that computes the clients' weights: its name, {"method": name, option: value}, or an
                aggregator; the step is then taken from its aggregate. Default: the data shares

    Only parameters take such steps; buffers become what the method of the weights makes of them, by default their mean.
    """

    name = "fedadam"
    paper = "Reddi et al., ICLR 2021"

    def _second(self, delta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.mul(v, self.beta2).addcmul_(delta, delta, value=1 - self.beta2)


@register
class FedYogi(_Adaptive):
    """Yogi on the server: Adam whose second moment moves by at most a fraction of the new square.

    lr          server learning rate; the paper tunes it, and so should you
    beta1       decay of the mean update m
    beta2       1 - beta2 of the squared update is added to v, or subtracted if v is larger than that square
    tau         adaptivity: added to sqrt(v), which starts at tau; a small tau makes the steps of all elements similar
    weights     the method that computes the clients' weights: its name, {"method": name, option: value}, or an
                aggregator; the step is then taken from its aggregate. Default: the data shares

    Only parameters take such steps; buffers become what the method of the weights makes of them, by default their mean.
    """

    name = "fedyogi"
    paper = "Reddi et al., ICLR 2021"

    def _second(self, delta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        square = delta * delta
        sign = torch.sub(v, square).sign_()
        return sign.mul_(square).mul_(self.beta2 - 1).add_(v)


@register
class FedAdagrad(_Adaptive):
    """Adagrad on the server: steps shrink with the sum of all squared updates so far.

    lr          server learning rate; the paper tunes it, and so should you
    beta1       decay of the mean update m; 0, as in the paper's experiments, means no momentum
    tau         adaptivity: added to sqrt(v), which starts at tau; a small tau makes the steps of all elements similar
    weights     the method that computes the clients' weights: its name, {"method": name, option: value}, or an
                aggregator; the step is then taken from its aggregate. Default: the data shares

    Only parameters take such steps; buffers become what the method of the weights makes of them, by default their mean.
    """

    name = "fedadagrad"
    paper = "Reddi et al., ICLR 2021"

    lr: LearningRate = 0.1
    beta1: Decay = 0.0
    beta2: float = field(init=False, default=0.0, repr=False)

    def _second(self, delta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(v, delta, delta)
