"""The net that the benchmarks train."""

import torch
from skorch import NeuralNetClassifier

from daskps import CNN


def new_net(batch_size, max_epochs, lr):
    """The CNN with dropout for images of 1x28x28, SGD with momentum."""
    torch.manual_seed(0)
    return NeuralNetClassifier(
        CNN,
        module__input_shape=(1, 28, 28),
        module__n_classes=10,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=lr,
        batch_size=batch_size,
        max_epochs=max_epochs,
        iterator_train__shuffle=True,
        train_split=None,
        verbose=0,
    )
