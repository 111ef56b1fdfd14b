-- purpose: delete the layout of a workload
-- grain:   at most one row
-- inputs:  workload_layouts
-- parameters: $workload

delete from workload_layouts
where workload = $workload
