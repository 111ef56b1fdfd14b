-- purpose: the stored order of parts of a workload's template
-- grain:   at most one row
-- inputs:  workload_layouts
-- parameters: $workload, $template_digest

select part_order
from workload_layouts
where workload = $workload and template_digest = $template_digest
