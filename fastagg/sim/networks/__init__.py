"""Layers of the networks that fastagg.sim.models names: all but the output layer.

plain.py      layers one after the other: mlp, lenet, cnn, cnn4, alexnet
residual.py   ResNets and wide ResNets
densenet.py   DenseNets
vit.py        a vision transformer
text.py       words
"""

Shape = tuple[int, int, int]  # of an image: channels, height, width
