r"""Cost of a round of secure aggregation: bytes and processor seconds, by the number of sites.

Sites and server are real, in one process and without training. With TenSEAL, the same numbers are also
encrypted as by NVFlare's filter for homomorphic encryption, with NVFlare's default parameters.

    python benchmarks/secure_aggregation.py --sites 4 16 --numbers 1952130
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import hardware, parser

from medfedaug.federation.messages.messages import Reply, Request
from medfedaug.federation.secure.masks import Member, SiteMasks
from medfedaug.federation.secure.unmasking import ServerMasks
from medfedaug.functional.weighted_mean import WeightedMean
from medfedaug.utils.secure_random import Words


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result, and its processor seconds."""
    started = time.process_time()
    result = call()
    return result, time.process_time() - started


def one_round(count: int, words: Words, vanished: int) -> dict[str, float]:
    """Run a round of ``count`` sites, of which some vanish after they have dealt shares."""
    names = [f"site-{number:02}" for number in range(count)]
    sites = {name: SiteMasks(name) for name in names}
    member, model = Member(1.0, ""), {"w": torch.from_numpy(words.view(np.int64))}
    server, seconds = ServerMasks(len(words)), dict.fromkeys(names, 0.0)

    def ask(request: Request, receivers: list[str], use: Callable[[str, Reply], None]) -> None:
        for name in receivers:
            masks, took = timed(lambda name=name: sites[name].answer(request, member))
            seconds[name] += took
            use(name, Reply(request.task, request.round, masks=masks))

    began = time.process_time()
    training = Request("train", 1, run="run", weights=model)
    ask(server.keys(training, {}, dict.fromkeys(names, 1.0)), names, server.accept_keys)
    ask(server.shares(), names, server.accept_shares)
    request = server.training(training)
    staying = names[: count - vanished]
    for name in staying:
        masked, took = timed(
            lambda name=name: sites[name].masking(request, member, {}).mask(words, model, model)
        )
        seconds[name] += took
        server.add(name, masked)
    ask(server.confirmation(), staying, server.accept_confirmation)
    ask(server.opening(), staying, server.accept_opening)
    (total, _), unmasking = timed(server.total)
    everything = time.process_time() - began
    expected = words * np.uint64(len(staying))
    assert np.array_equal(total, expected), "the masks do not cancel out"
    return {
        "site": statistics.mean(seconds[name] for name in staying),
        "server": everything - sum(seconds.values()),
        "unmasking": unmasking,
        "up": server.bytes_up / count + 8 * len(words),
        "down": server.bytes_down / count,
    }


def plain(numbers: torch.Tensor, count: int) -> float:
    """Return the processor seconds of the mean without masks."""
    mean = WeightedMean()

    def add() -> None:
        for _ in range(count):
            mean.add({"w": numbers}, 1.0)
        mean.result()

    return timed(add)[1]


def encrypted(numbers: torch.Tensor, count: int) -> str:
    """Describe bytes and seconds of NVFlare's encryption, measured on a part of the numbers."""
    try:
        import tenseal
    except ImportError:
        return "TenSEAL is not installed"
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 40]
    )
    context.global_scale = 2**40
    part = numbers[: 2**17].tolist()
    vector, encrypting = timed(lambda: tenseal.ckks_vector(context, part))
    text = vector.serialize()

    def add() -> None:
        total = vector
        for _ in range(count - 1):
            total = total + vector

    _, adding = timed(add)
    values, decrypting = timed(vector.decrypt)
    error = max(abs(a - b) for a, b in zip(part, values, strict=True))
    scale = len(numbers) / len(part)
    return (
        f"TenSEAL {tenseal.__version__}, CKKS: {len(text) * scale / 1e6:.0f} MB up, site "
        f"{(encrypting + decrypting) * scale:.2f} s, server {adding * scale:.2f} s, error up to {error:.1g}"
    )


def main() -> None:
    arguments = parser(__doc__, repeats=5)
    arguments.add_argument("--sites", type=int, nargs="+", default=[4, 16])
    arguments.add_argument("--numbers", type=int, default=1_952_130, help="of the default U-Net")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    numbers = torch.randn(options.numbers, generator=torch.Generator().manual_seed(0)) * 0.05
    words = (numbers.double() / 16 * 2.0**36).round().to(torch.int64).numpy().view(np.uint64)
    print(f"{hardware()}\n{options.numbers} numbers, {4 * options.numbers / 1e6:.1f} MB without masks\n")
    print(
        "| sites | vanished | up per site | down per site, without the model | site, s | server, s "
        "| without masks, s |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for count in options.sites:
        for vanished in (0, 1):
            rounds = [one_round(count, words, vanished) for _ in range(options.repeats)]
            middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
            mean = statistics.median(plain(numbers, count) for _ in range(options.repeats))
            print(
                f"| {count} | {vanished} | {middle['up'] / 1e6:.2f} MB | {middle['down'] / 1e3:.1f} kB | "
                f"{middle['site']:.2f} | {middle['server']:.2f} | {mean:.2f} |"
            )
        print(f"  {count} sites, {encrypted(numbers, count)}")


if __name__ == "__main__":
    main()
