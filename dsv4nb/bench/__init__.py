"""What is measured on this machine.

python -m dsv4nb.bench decode|spec|reuse|overhead|gil              a checkpoint, as a person meets it
python -m dsv4nb.bench decode|rounds|prefill|load --synthetic flash-0731 --devices 0,1
                                                                   the GPU engine on random weights of any shape
python -m dsv4nb.bench kernels --synthetic flash-0731 --devices 0,1
                                                                   its kernels on each GPU, adding up to the step
python -m dsv4nb.bench peer --synthetic flash-0731 --devices 0,1   the same token by transformers, in the same process
"""
