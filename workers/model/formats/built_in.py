"""The checkpoint formats of the house, a line each: a module that registers one."""

from . import block_fp8 as block_fp8
from . import compressed_fp8 as compressed_fp8
from . import compressed_int as compressed_int
from . import mxfp4 as mxfp4
from . import nvfp4 as nvfp4
from . import plain as plain
