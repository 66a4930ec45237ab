"""Where the operators and the compiled libraries are. tools/hub_layout.py writes another one."""

from pathlib import Path

NAMESPACE = "boltzattn"  # torch.ops.boltzattn
CPU_LIBRARY = Path(__file__).parents[1] / "libboltzattn.so"
CUDA_LIBRARY = Path(__file__).parents[1] / "libboltzattn_cuda.so"
