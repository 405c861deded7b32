"""Prints the checkpoints of one run and when each expires, as one line of JSON.

python checkpoints.py TINKER_PATH_OF_ANY_OF_THEM
"""

import json
import sys

import tinker

run_id = tinker.ParsedCheckpointTinkerPath.from_tinker_path(sys.argv[1]).training_run_id
listed = tinker.ServiceClient().create_rest_client().list_checkpoints(run_id).result().checkpoints
print(json.dumps({one.tinker_path: str(one.expires_at) if one.expires_at else None for one in listed}))
