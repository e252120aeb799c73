"""The Megatron-core engine, which really trains."""

from shardscope.frameworks.megatron.engine.launching import stand_in_for_triton_kernels

# Before a module of this package, or of the rehearsal, imports megatron-core.
stand_in_for_triton_kernels()
