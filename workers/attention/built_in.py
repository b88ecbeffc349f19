"""The attentions of the house, a line each: a module that registers one."""

from . import flashinfer_way as flashinfer_way
from . import gathered_way as gathered_way
from . import sdpa_way as sdpa_way
