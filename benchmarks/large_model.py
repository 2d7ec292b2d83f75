"""The memory of a model of 23 million parameters against a plain PyTorch loop, and what a run folder keeps for it.

    python benchmarks/large_model.py [--width 120] [--turns 2] [--methods fedavg fedavg-fixmatch]

ResNet-9 on digits, padded to 16x16, whose weights are most of the memory: 2 rounds of 2 clients, 3 steps each, Adam.
Each side is a process of its own, in turns; its largest resident memory and processor time are what `os.wait4` says.
The plain loop has a global network and one that trains, its gradients and its Adam, a sum of the updates, the test
images' accuracy and a `torch.save` of the model each round; its unlabeled images are noise on the same digits.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LABELED, UNLABELED, STEPS, ROUNDS, CLIENTS = 10, 30, 3, 2, 2


class Spent(NamedTuple):
    """What a process took: its largest resident memory in MB, its processor seconds, and what it left, in MB."""

    memory: float
    seconds: float
    left: float


def plain(method: str, width: int, folder: Path) -> None:
    """Play the plain loop, with the `torch.nn` network of the tests."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    import copy

    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch_models import TorchResNet9

    torch.set_num_threads(1)
    torch.manual_seed(0)
    held = np.load(ROOT / "src/halfmoon/data/digits.npz")
    images = F.pad(torch.from_numpy(held["images"]).reshape(-1, 1, 8, 8).float() / 16, (4,) * 4)
    labels = torch.from_numpy(held["labels"]).long()
    model = TorchResNet9(1, 10, width)
    local = copy.deepcopy(model)
    for _ in range(ROUNDS):
        total: dict[str, torch.Tensor] = {}
        for _ in range(CLIENTS):
            local.load_state_dict(model.state_dict())
            local.train()
            optimizer = torch.optim.Adam(local.parameters(), 1e-3)
            for _ in range(STEPS):
                rows = torch.randint(0, len(labels), (LABELED,))
                optimizer.zero_grad()
                loss = F.cross_entropy(local(images[rows]), labels[rows])
                if method == "fedavg-fixmatch":
                    u = images[torch.randint(0, len(labels), (UNLABELED,))]
                    with torch.no_grad():
                        sure, pseudo = local(u).softmax(1).max(1)
                    strong = local(u + 0.1 * torch.randn_like(u))
                    loss = loss + ((sure > 0.95) * F.cross_entropy(strong, pseudo, reduction="none")).mean()
                loss.backward()
                optimizer.step()
            for name, leaf in local.state_dict().items():
                total[name] = total[name].add_(leaf) if name in total else leaf.clone()
            del optimizer, loss
            local.zero_grad(set_to_none=True)
        model.load_state_dict({name: leaf / CLIENTS for name, leaf in total.items()})
        model.eval()
        with torch.no_grad():
            said = torch.cat([model(part).argmax(1) for part in images[-360:].split(120)])
            print((said == labels[-360:]).float().mean().item())
        torch.save(model.state_dict(), folder / "model.pt")


def ours(method: str, width: int, folder: Path) -> list[str]:
    """Return halfmoon's command."""
    words = [
        *("--method", method, "--network", "resnet9", "--width", str(width), "--clients", str(CLIENTS)),
        *(
            "--cohort",
            str(CLIENTS),
            "--rounds",
            str(ROUNDS),
            "--steps",
            str(STEPS),
            "--threads",
            "1",
            "--device",
            "cpu",
        ),
        *("--labeled-batch", str(LABELED), "--unlabeled-batch", str(UNLABELED), "--run-dir", str(folder / "run")),
    ]
    return [sys.executable, "-m", "halfmoon", "run", *words]


def spent(command: list[str], folder: Path) -> Spent:
    """Run a command to its end; raise SystemExit with its words where it fails."""
    with (folder / "words").open("w") as words:
        process = subprocess.Popen(command, stdout=words, stderr=words, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit((folder / "words").read_text())
    left = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Spent(usage.ru_maxrss * 1024 / 1e6, usage.ru_utime + usage.ru_stime, left / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description="The memory of a large model against a plain loop.")
    parser.add_argument("--width", type=int, default=120)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedavg-fixmatch"])
    parser.add_argument("--plain", metavar="FOLDER", help="play the plain loop in this process")
    options = parser.parse_args()
    if options.plain:
        plain(options.methods[0], options.width, Path(options.plain))
        return
    print(shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]), end="\n\n")
    print("| method | plain, MB | halfmoon, MB | times | processor, times | plain keeps, MB | run folder, MB |")
    print("|---|---|---|---|---|---|---|")
    for method in options.methods:
        found: list[tuple[Spent, Spent]] = []
        for _ in range(options.turns):
            with tempfile.TemporaryDirectory() as place:
                hand, own = Path(place, "plain"), Path(place, "halfmoon")
                for folder in (hand, own):
                    folder.mkdir()
                words = ["--plain", str(hand), "--methods", method, "--width", str(options.width)]
                found.append(
                    (spent([sys.executable, __file__, *words], hand), spent(ours(method, options.width, own), own))
                )
        a, b = ([statistics.median(each) for each in zip(*side, strict=True)] for side in zip(*found, strict=True))
        times = [statistics.median(own[k] / hand[k] for hand, own in found) for k in (0, 1)]
        print(f"| {method} | {a[0]:,.0f} | {b[0]:,.0f} | {times[0]:.2f} | {times[1]:.2f} | {a[2]:,.0f} | {b[2]:,.0f} |")


if __name__ == "__main__":
    main()
