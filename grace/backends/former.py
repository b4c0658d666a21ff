"""Former names of array functions, as aliases: `xp.empty` is `xp.buffers.empty`."""

FORMER = {
    old: (group, new)
    for group, names in {
        "buffers": {
            "empty": "empty",
            "side_by_side": "payload_arena",
            "part": "empty_payload",
            "together": "streaming_writes",
            "copy": "copy",
            "write": "write",
            "contiguous": "contiguous",
            "address": "address",
            "same_memory": "same_memory",
            "overlap": "overlap",
            "to_bytes": "to_bytes",
            "from_bytes": "from_bytes",
            "joined": "concat_bytes",
        },
        "inplace": {
            "add_to": "add",
            "subtract_from": "subtract",
            "multiply_in": "multiply",
            "divide_in": "divide",
            "add_product": "add_product",
            "floor_in": "floor",
            "put": "scatter",
        },
        "linalg": {
            "qr": "qr",
            "eigh": "eigh",
            "solve": "solve",
            "unit_rows": "unit_rows",
            "left_factor": "left_factor",
            "right_factor": "right_factor",
            "product_into": "product_into",
            "subtract_product": "subtract_product",
            "part_product": "part_product",
        },
        "bits": {
            "pack_bits": "pack",
            "unpack_bits": "unpack",
            "pack_signs": "pack_signs",
            "unpack_signs": "unpack_signs",
            "by_byte": "map_bytes",
        },
        "random": {
            "words": "words",
            "sample": "sample",
            "uniform": "uniform",
            "noise": "noise",
            "kept": "cached",
        },
    }.items()
    for old, new in names.items()
}
"""By former name: the group and the name that replaced it."""
