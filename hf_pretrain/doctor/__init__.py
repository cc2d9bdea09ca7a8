"""The checks of this machine (`recipes/doctor.py`): its parts, and a training step on each kind of device."""
