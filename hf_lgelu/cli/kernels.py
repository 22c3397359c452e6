"""`hf-lgelu kernels`: which implementations of the activation this machine has."""

from argparse import Namespace

from hf_lgelu.activation.report import kernel_report


def kernels(arguments: Namespace) -> None:
    """Print the report of `kernel_report`."""
    print(kernel_report())
