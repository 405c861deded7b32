"""Training recipes as functions: supervised fine-tuning, preferences, rewards, distillation, evaluation.

Each recipe is one flat loop over the public SDK, meant to be copied; `tinkex train` calls them. They run
wherever a ServiceClient does: in this process, on a server, on the hosted service.
"""
