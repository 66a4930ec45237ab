"""Triton kernels, installed as `boltzattn.triton_kernels`."""

if __name__ == "triton_kernels":
    raise ImportError(
        "this folder is installed as boltzattn.triton_kernels; import it by that name "
        "(the bare name triton_kernels belongs to another project)"
    )
