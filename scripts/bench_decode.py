"""How many tokens a second a ReLU network decodes, dense and with `skip_zeros`, interleaved in one run.

The network is a LLaMA of SmolLM2-1.7B's shape with random weights, float32, and biases of the gates that leave a given
share of the units live. The same weights serve both ways. Rows go to a CSV file as they are measured, and a rerun
measures only what is not there. With all units live, the compiled loop is compared with torch's own product.

    python scripts/bench_decode.py --csv decode.csv              20 minutes, 9 GB
"""

import copy
import os
import time
from dataclasses import dataclass, field

import torch
from lgelu_lab.rows_file import RowsFile
from lgelu_lab.studies.checkout import last_commit
from torch import nn
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import hf_lgelu
from hf_lgelu.environment import hardware, package_versions

SHAPE = {
    "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64
}  # fmt: skip
KEY = ("shape", "live", "threads", "wait_policy")
POLICY = os.environ.get("OMP_WAIT_POLICY", "default")
RATIOS = ("ratio_q20", "ratio_median", "ratio_q80")
COLUMNS = (
    *KEY, "live_while_decoding", "tokens", "rounds", "dense_tokens_a_second", "skipping_tokens_a_second",
    *RATIOS, "processor_ratio_median", "same_tokens",
    "cpu", "torch", "transformers", "hf_lgelu", "commit",
)  # fmt: skip
"""Ratios are dense over skipping in the same round, by the clock and by processor time; `same_tokens` is whether both
ways gave the same tokens. OpenMP's wait policy counts where other work takes the cores: threads that wait then spin."""


@dataclass
class DecodeArguments:
    """What is measured, and where the rows go."""

    csv: str = field(default="runs/bench_decode.csv", metadata={"help": "File of the rows; they are added to it."})
    live: list[float] = field(default_factory=lambda: [1.0, 0.37, 0.2], metadata={"help": "Shares of live units."})
    threads: list[int] = field(default_factory=lambda: [1, 2], metadata={"help": "Threads of the CPU."})
    rounds: int = field(default=7, metadata={"help": "Both ways in turn, so many times."})
    tokens: int = field(default=8, metadata={"help": "Decoded in one way and round, from a prompt of one token."})
    small: bool = field(default=False, metadata={"help": "A tiny network, to try the script."})


def main() -> None:
    """Measure, and print a line a row."""
    (arguments,) = HfArgumentParser(DecodeArguments).parse_args_into_dataclasses()
    logging.set_verbosity_error()
    provenance = {
        "cpu": hardware(1)["cpu"],
        "torch": torch.__version__,
        "transformers": package_versions()["transformers"],
        "hf_lgelu": package_versions()["hf-lgelu"],
        "commit": last_commit("hf_lgelu") or "unknown",
    }
    results = RowsFile(arguments.csv, COLUMNS, KEY)
    shape = SMALL if arguments.small else SHAPE
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**shape, hidden_act="relu", mlp_bias=True)).eval()
    behind = {id(layer.mlp.down_proj.weight) for layer in dense.model.layers}
    skipping = copy.deepcopy(dense, {id(held): held for held in dense.parameters() if id(held) not in behind})
    hf_lgelu.skip_zeros(skipping)
    for live in arguments.live:
        set_live(dense, live)
        for threads in arguments.threads:
            size = "x".join(str(shape[name]) for name in list(shape)[:3])
            asked = {"shape": size, "live": live, "threads": threads, "wait_policy": POLICY}
            if asked in results:
                continue
            torch.set_num_threads(threads)
            row = asked | measure(dense, skipping, arguments.rounds, arguments.tokens) | provenance
            results.append(row)
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)


@torch.no_grad()
def set_live(model: LlamaForCausalLM, share: float) -> None:
    """Give each gate the bias at which this share of the units is live, over 64 random tokens."""

    def set_bias(gate: nn.Linear, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        unbiased = output - gate.bias
        gate.bias.fill_(1e3 if share == 1 else -unbiased.flatten().kthvalue(round((1 - share) * output.numel())).values)
        return unbiased + gate.bias

    handles = [layer.mlp.gate_proj.register_forward_hook(set_bias) for layer in model.model.layers]
    model(torch.randint(model.config.vocab_size, (1, 64)))
    for handle in handles:
        handle.remove()


def measure(dense: LlamaForCausalLM, skipping: LlamaForCausalLM, rounds: int, tokens: int) -> dict[str, object]:
    """Both ways in turn, and what comes of it."""
    ways, seen, shares = {"dense": dense, "skipping": skipping}, dict[str, torch.Tensor](), list[torch.Tensor]()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    note = [layer.mlp.act_fn.register_forward_hook(lambda *held: shares.append((held[2] != 0).float().mean()))
            for layer in dense.model.layers]  # fmt: skip
    for turn in range(1 + rounds):
        for name, model in ways.items():
            started = time.perf_counter(), time.process_time()
            seen[name] = model.generate(
                torch.tensor([[1]]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
            if turn:  # the first warms up
                seconds[name].append((time.perf_counter() - started[0], time.process_time() - started[1]))
        for handle in note:
            handle.remove()
    clock, processor = (torch.tensor([[each[which] for each in seconds[name]] for name in ways]) for which in (0, 1))
    ratios = (clock[0] / clock[1]).quantile(torch.tensor([0.2, 0.5, 0.8]))
    return {
        "live_while_decoding": round(torch.stack(shares).mean().item(), 3),
        "tokens": tokens,
        "rounds": rounds,
        **{f"{name}_tokens_a_second": round(tokens / clock[index].median().item(), 3)
           for index, name in enumerate(ways)},
        **{name: round(value, 3) for name, value in zip(RATIOS, ratios.tolist(), strict=True)},
        "processor_ratio_median": round((processor[0] / processor[1]).median().item(), 3),
        "same_tokens": torch.equal(seen["dense"], seen["skipping"]),
    }  # fmt: skip


if __name__ == "__main__":
    main()
