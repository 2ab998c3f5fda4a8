"""Federated training of digits by NVFlare's simulator, with a fastagg method as the aggregator."""

import argparse
import json
import re
import sys
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat, TransferType
from nvflare.recipe.sim_env import WORKSPACE_ROOT, SimEnv

from fastagg.integrations.nvflare import FastAggAggregator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from model import DigitsNet  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--method", default="fedawa")
parser.add_argument("--options", type=json.loads, default={}, help="of the method: '{\"layerwise\": true}'")
parser.add_argument("--on-bad-client", default="raise", choices=["raise", "drop"])
parser.add_argument("--sites", type=int, default=3)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--diff", action="store_true", help="clients send what they changed, not their models")
parser.add_argument("--offload", action="store_true", help="NVFlare keeps the clients' tensors on disk")
parser.add_argument("--broken", default="", help="name of a site that sends NaN")
parser.add_argument("--workspace", default=WORKSPACE_ROOT)
args = parser.parse_args()

recipe = FedAvgRecipe(
    name="digits",
    model=DigitsNet(args.dtype),
    min_clients=args.sites,
    num_rounds=args.rounds,
    train_script=str(HERE / "client.py"),
    train_args=f"--dtype {args.dtype}" + (f" --broken {args.broken}" if args.broken else ""),
    aggregator=FastAggAggregator(args.method, args.options, on_bad_client=args.on_bad_client),
    server_expected_format=ExchangeFormat.PYTORCH,  # bfloat16 has no NumPy format
    params_transfer_type=TransferType.DIFF if args.diff else TransferType.FULL,
    enable_tensor_disk_offload=args.offload,
)
# with --export --export-dir DIR, which NVFlare itself reads, the job is written to DIR and the program ends here
run = recipe.execute(SimEnv(num_clients=args.sites, workspace_root=args.workspace))
server = Path(run.get_result()) / "server"
for line in (server / "simulate_job/metrics/round_metrics.jsonl").read_text().splitlines():
    metrics = json.loads(line)
    accuracy = metrics["aggregated_metrics"][0]["value"]
    print(f"round {metrics['round']}: accuracy of the model that was sent out {accuracy:.3f}")
print(*re.findall(rf"{args.method}: weights .*", (server / "log.txt").read_text()), sep="\n")
