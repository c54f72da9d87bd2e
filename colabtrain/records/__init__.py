"""What a decision is: schema, readers, selection and caps. Knows no model, no thread and no network."""

from colabtrain.records.caps import cap_record as cap_record
from colabtrain.records.reader import load_records as load_records
from colabtrain.records.schema import Question as Question
from colabtrain.records.schema import Record as Record
from colabtrain.records.schema import Seg as Seg
from colabtrain.records.selection import Selection as Selection
from colabtrain.records.selection import select as select
