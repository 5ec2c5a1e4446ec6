"""What a number becomes: precisions, policies over module paths, quantization kernels."""
