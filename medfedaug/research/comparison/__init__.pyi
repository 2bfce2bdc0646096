from .patient_table import PatientRow as PatientRow
from .patient_table import PatientTable as PatientTable
from .patient_table import patient_table as patient_table
from .verdict import Verdict as Verdict
from .verdict import judge as judge
