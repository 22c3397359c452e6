"""The measurements that scripts/downstream.py makes, one row each."""

from hf_lgelu.downstream.certificate import CERTIFICATE
from hf_lgelu.downstream.conversion import CONVERSION
from hf_lgelu.downstream.conversion_finetuning import FINETUNING
from hf_lgelu.downstream.int8 import INT8
from hf_lgelu.downstream.linear_pieces import LINEAR_PIECES
from hf_lgelu.downstream.measurement import Measurement
from hf_lgelu.downstream.pruning import PRUNING
from hf_lgelu.downstream.verification import VERIFICATION
from hf_lgelu.downstream.zeros import ZEROS

MEASUREMENTS: dict[str, Measurement] = {
    measurement.name: measurement
    for measurement in (INT8, VERIFICATION, ZEROS, PRUNING, LINEAR_PIECES, CERTIFICATE, CONVERSION, FINETUNING)
}
