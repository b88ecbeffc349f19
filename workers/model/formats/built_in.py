"""The checkpoint formats of the house, a line each: a module that registers one."""

from . import plain as plain
