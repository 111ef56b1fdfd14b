-- purpose: store a certificate unless it is stored already
-- grain:   at most one row
-- inputs:  none
-- parameters: $certificate (a struct with a field for each column)

insert into certificates by name
select unnest($certificate)
where not exists (select 1 from certificates where certificate_id = ($certificate).certificate_id)
