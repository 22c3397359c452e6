"""The measurements that scripts/downstream.py makes, one row each."""

from lgelu_lab.measurements.certificate import CERTIFICATE
from lgelu_lab.measurements.conversion import CONVERSION
from lgelu_lab.measurements.conversion_finetuning import FINETUNING
from lgelu_lab.measurements.int8 import INT8
from lgelu_lab.measurements.linear_pieces import LINEAR_PIECES
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.pruning import PRUNING
from lgelu_lab.measurements.verification import VERIFICATION
from lgelu_lab.measurements.zeros import ZEROS

MEASUREMENTS: dict[str, Measurement] = {
    measurement.name: measurement
    for measurement in (INT8, VERIFICATION, ZEROS, PRUNING, LINEAR_PIECES, CERTIFICATE, CONVERSION, FINETUNING)
}
