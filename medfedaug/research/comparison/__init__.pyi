from .patient_table import patient_table as patient_table
from .verdict import Verdict as Verdict
from .verdict import judge as judge
