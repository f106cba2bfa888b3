"""Weights to start from: torchvision's of ImageNet, or a file."""
from pathlib import Path

import torch
from torchvision.models import get_model_weights

from support import UserError


def load(model, source, name):
    """Put --weights `source` into the network of --model `name`. A classifier of another size keeps
    its new weights."""
    own, fitting = model.state_dict(), {}
    for key, value in read(source, name).items():
        if key not in own and hasattr(model, "head"):         # as torchvision names it
            key = f"network.{key}".replace(f"network.{model.head}.", "classifier.")
        fits = key in own and value.shape == own[key].shape
        if not fits and not key.startswith("classifier."):
            raise UserError(f"--weights {source} does not fit --model {name}, which has no {key} "
                            f"{tuple(value.shape)}; name the model that it belongs to")
        if fits:
            fitting[key] = value
    for key in model.load_state_dict(fitting, strict=False).missing_keys:
        if not key.startswith("classifier."):
            raise UserError(f"--weights {source} does not fit --model {name}: it lacks {key}; name "
                            f"the model that it belongs to")


def read(source, name):
    """A state_dict: `default`, torchvision's of ImageNet, or that of a file."""
    url = None
    try:
        if source != "default":
            return dict(torch.load(source, map_location="cpu", weights_only=True))
        url = get_model_weights(name).DEFAULT.url
        return torch.hub.load_state_dict_from_url(url, map_location="cpu", weights_only=True)
    except Exception as error:                                # torch raises a dozen kinds
        remedy = (f"put the file {url} into {Path(torch.hub.get_dir(), 'checkpoints')}" if url else
                  "name a file that torch.save wrote a state_dict of that network to")
        raise UserError(f"--weights {source}: none that can be read for --model {name} "
                        f"({type(error).__name__}); {remedy}") from error
