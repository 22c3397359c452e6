"""The benchmarks, one row a model–dataset pair."""

from lgelu_lab.benchmarks.adult import ADULT
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.cifar import RESNET18_CIFAR10, RESNET18_CIFAR100
from lgelu_lab.benchmarks.digits import DIGITS
from lgelu_lab.benchmarks.fashion_mnist import FASHION_MNIST
from lgelu_lab.benchmarks.pretrained import REACTIONS, SMOLLM2
from lgelu_lab.benchmarks.tiny_imagenet import DEIT_TINY_IMAGENET
from lgelu_lab.benchmarks.wikitext import GPT2_WIKITEXT2

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        *(DIGITS, ADULT, FASHION_MNIST),
        *(RESNET18_CIFAR10, RESNET18_CIFAR100),
        DEIT_TINY_IMAGENET,
        GPT2_WIKITEXT2,
        *(REACTIONS, SMOLLM2),
    )
}


def check_benchmark(name: str | None) -> Benchmark:
    """Return the row of BENCHMARKS, or raise naming the accepted ones."""
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; accepted: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
