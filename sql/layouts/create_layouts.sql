-- purpose: the order of the prompt's parts that a night chose for a workload with layout = "auto"
-- grain:   one row per workload
-- inputs:  none
-- parameters: none

create table if not exists workload_layouts (
    workload text,
    template_digest text,          -- of the prompt as the file has it; another prompt needs another choice
    part_order integer[],          -- numbers of the template's parts, from 0, in the chosen order
    template text,                 -- the template in this order
    num_computed_tokens bigint,    -- computed prompt tokens of the night's plan, of all workloads planned together
    num_written_tokens bigint,     -- the same with every template in its written order
    chosen_at timestamptz
)
