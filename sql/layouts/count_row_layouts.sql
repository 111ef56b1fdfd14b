-- purpose: number of rows of a workload with an order of parts of their own
-- grain:   one row
-- inputs:  workload_row_layouts
-- parameters: $workload, $template_digest

select count(*)
from workload_row_layouts
where workload = $workload and template_digest = $template_digest
