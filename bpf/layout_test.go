// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"instar/dispatch/connid"
)

// dataPlanes are the data planes that this build has.
var dataPlanes = map[string]struct {
	load     func() (*ebpf.CollectionSpec, error)
	steering uint32
	program  string
}{
	"quic":      {loadQuic, SteeringQUIC, quicProgQuic},
	"stateless": {loadStateless, SteeringStateless, statelessProgStateless},
	"flow":      {loadFlow, SteeringFlow, flowProgFlow},
	"wireguard": {loadWireguard, SteeringWireGuard, wireguardProgWireguard},
	"custom":    {loadCustom, SteeringCustom, customProgCustom},
}

// flowTables are keys and values of the flow maps.
var flowTables = map[uint32]map[string]reflect.Type{
	SteeringQUIC: {"key": reflect.TypeFor[uint64](), "value": reflect.TypeFor[Flow]()},
	SteeringFlow: {"key": reflect.TypeFor[Peer](), "value": reflect.TypeFor[Tracked]()},

	SteeringCustom:    {"key": reflect.TypeFor[uint64](), "value": reflect.TypeFor[Flow]()},
	SteeringWireGuard: {"key": reflect.TypeFor[uint32](), "value": reflect.TypeFor[Tracked]()},
}

// sameLayout reports where a Go type and a C type differ in size, offset or
// order of fields.
func sameLayout(path string, goType reflect.Type, cType btf.Type) error {
	cType = btf.UnderlyingType(cType)
	size, err := btf.Sizeof(cType)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if int(goType.Size()) != size {
		return fmt.Errorf("%s: %v has %d bytes, %v has %d", path, goType, goType.Size(), cType, size)
	}
	switch c := cType.(type) {
	case *btf.Struct:
		var fields []reflect.StructField
		for i := range goType.NumField() {
			if f := goType.Field(i); f.Type.Size() > 0 {
				fields = append(fields, f)
			}
		}
		if len(fields) != len(c.Members) {
			return fmt.Errorf("%s: %d fields, %d members", path, len(fields), len(c.Members))
		}
		for i, m := range c.Members {
			f := fields[i]
			if !strings.EqualFold(f.Name, strings.ReplaceAll(m.Name, "_", "")) {
				return fmt.Errorf("%s: field %s where C has %s", path, f.Name, m.Name)
			}
			if int(f.Offset) != int(m.Offset.Bytes()) {
				return fmt.Errorf("%s.%s: offset %d, in C %d", path, f.Name, f.Offset, m.Offset.Bytes())
			}
			if err := sameLayout(path+"."+f.Name, f.Type, m.Type); err != nil {
				return err
			}
		}
	case *btf.Array:
		if goType.Kind() != reflect.Array || goType.Len() != int(c.Nelems) {
			return fmt.Errorf("%s: %v, in C %d elements", path, goType, c.Nelems)
		}
		return sameLayout(path+"[]", goType.Elem(), c.Type)
	case *btf.Int:
		switch goType.Kind() {
		case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		default:
			return fmt.Errorf("%s: %v is no unsigned number", path, goType)
		}
	default:
		return fmt.Errorf("%s: unexpected C type %v", path, cType)
	}
	return nil
}

// TestLayout compares the structures with the type information in the objects,
// which has what the compiler made of abi.h.
func TestLayout(t *testing.T) {
	for name, o := range dataPlanes {
		spec, err := o.load()
		if err != nil {
			t.Fatal(err)
		}
		variable := func(v string) btf.Type {
			if spec.Variables[v] == nil {
				t.Fatalf("%s: no variable %s", name, v)
			}
			return spec.Variables[v].Type.Type
		}
		for path, pair := range map[string]struct {
			goType reflect.Type
			cType  btf.Type
		}{
			"control":  {reflect.TypeFor[Control](), variable(quicVarControl)},
			"secrets":  {reflect.TypeFor[Secrets](), variable(quicVarSecrets)},
			"verdicts": {reflect.TypeFor[Counters](), spec.Maps[MapVerdicts].Value},
			"slot":     {reflect.TypeFor[Slot](), anyType(t, spec, "instar_slot")},
			"order":    {reflect.TypeFor[Order](), anyType(t, spec, "instar_order")},
			"info":     {reflect.TypeFor[Info](), anyType(t, spec, "instar_info")},
		} {
			if err := sameLayout(path, pair.goType, pair.cType); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for path, m := range flowTables[o.steering] {
			typ := spec.Maps[MapFlows].Value
			if path == "key" {
				typ = spec.Maps[MapFlows].Key
			}
			if err := sameLayout("flows' "+path, m, typ); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if (spec.Maps[MapFlows] != nil) != (flowTables[o.steering] != nil) {
			t.Errorf("%s: the flow map is %v", name, spec.Maps[MapFlows])
		}
		for m, want := range map[string]uintptr{
			MapControl:  reflect.TypeFor[Control]().Size(),
			MapSecrets:  reflect.TypeFor[Secrets]().Size(),
			MapVerdicts: reflect.TypeFor[Counters]().Size(),
			MapSockets:  8, // a lookup gives the cookie
		} {
			if got := spec.Maps[m]; got == nil || uintptr(got.ValueSize) != want {
				t.Errorf("%s: map %s is %v, want values of %d bytes", name, m, got, want)
			}
		}
	}
}

func anyType(t *testing.T, spec *ebpf.CollectionSpec, name string) btf.Type {
	t.Helper()
	typ, err := spec.Types.AnyTypeByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return typ
}

// TestLayoutFirst: who maps the memory of a group of another build finds the
// version where it has always been.
func TestLayoutFirst(t *testing.T) {
	f, _ := reflect.TypeFor[Control]().FieldByName("Layout")
	if f.Offset != 0 || f.Type.Kind() != reflect.Uint32 {
		t.Errorf("layout is a %v at %d, want the first four bytes", f.Type, f.Offset)
	}
	for name, o := range dataPlanes {
		spec, err := o.load()
		if err != nil {
			t.Fatal(err)
		}
		v := spec.Variables[quicVarControl]
		if v.Offset != 0 || v.SectionName != MapControl || v.Size() != spec.Maps[MapControl].ValueSize {
			t.Errorf("%s: control is %d bytes at %d of %s, want all of %s", name, v.Size(), v.Offset, v.SectionName, MapControl)
		}
	}
}

// TestLayoutPinned is a reminder: a layout that was released never changes,
// another one gets another number.
func TestLayoutPinned(t *testing.T) {
	offsets := func(typ reflect.Type) string {
		var s []string
		for i := range typ.NumField() {
			if f := typ.Field(i); f.Type.Size() > 0 {
				s = append(s, fmt.Sprintf("%s:%d", f.Name, f.Offset))
			}
		}
		return fmt.Sprintf("%s =%d", strings.Join(s, " "), typ.Size())
	}
	got := map[string]string{
		"control":  offsets(reflect.TypeFor[Control]()),
		"slot":     offsets(reflect.TypeFor[Slot]()),
		"order":    offsets(reflect.TypeFor[Order]()),
		"info":     offsets(reflect.TypeFor[Info]()),
		"secrets":  offsets(reflect.TypeFor[Secrets]()),
		"flow":     offsets(reflect.TypeFor[Flow]()),
		"peer":     offsets(reflect.TypeFor[Peer]()),
		"tracked":  offsets(reflect.TypeFor[Tracked]()),
		"counters": offsets(reflect.TypeFor[Counters]()),
	}
	want := layouts[Layout]
	if want == nil {
		t.Fatalf("no record of layout %d: add it", Layout)
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if got[name] != want[name] {
			t.Errorf("layout %d, %s:\n got %s\nwant %s", Layout, name, got[name], want[name])
		}
	}
}

// layouts are the offsets and sizes of each version.
var layouts = map[uint32]map[string]string{
	1: {
		"control": "Layout:0 Steering:4 MaxGenerations:8 MaxWorkers:12 FlowEntries:16 Prefix:20 NextNumber:24 FlowTimeout:28 FlowLearning:30 Pad:31 " +
			"Active:32 Changes:40 Service:48 Network:112 Address:120 Device:184 Program:200 Orders:264 Slots:1320 Info:3368 =27944",
		"slot":     "Number:0 Workers:4 Exhausted:6 Pad:7 =8",
		"order":    "Activated:0 Total:2 Pad:4 Slot:8 =264",
		"info":     "Stage:0 Number:4 Pid:8 PidNamespace:12 PidStart:16 Joined:24 Activated:32 Superseded:40 Deadline:48 PacketsBefore:56 Build:64 =96",
		"secrets":  "Master:0 Cid:32 MulHandle:48 MulGeneration:56 Affinity:64 =80",
		"flow":     "Generation:0 Handle:4 Pad:6 =8",
		"peer":     "Address:0 Port:16 Pad:18 =20",
		"tracked":  "Owner:0 Seen:8 =16",
		"counters": "Verdicts:0 Tick:64 Now:72 Slots:80 =4176",
	},
}

// TestSpec sets what the group asks for.
func TestSpec(t *testing.T) {
	for name, o := range dataPlanes {
		c := Config{Steering: o.steering, MaxGenerations: 6, MaxWorkers: 40, FlowEntries: 12345, Prefix: 11, FlowTimeout: 7, FlowLearning: LearningAssured, Dissector: constant(1 << 62)}
		spec, program, err := Spec(c)
		if err != nil {
			t.Fatal(err)
		}
		if program != o.program || spec.Programs[program] == nil || len(spec.Programs) != 1 {
			t.Errorf("%s: program %s of %v", name, program, spec.Programs)
		}
		if typ := spec.Programs[program].Type; typ != ebpf.SkReuseport {
			t.Errorf("%s: program type %v", name, typ)
		}
		want := []string{MapControl, MapSecrets, ".rodata", MapFlows, MapSockets, MapVerdicts}
		if o.steering == SteeringStateless {
			want = slices.Delete(want, 3, 4)
		}
		if got := slices.Sorted(maps.Keys(spec.Maps)); !slices.Equal(got, want) {
			t.Errorf("%s: maps %q", name, got)
		}
		for constant, want := range map[string]uint32{quicVarMaxWorkers: 40, quicVarPrefix: 11} {
			v := spec.Variables[constant]
			if v == nil {
				t.Errorf("%s: no constant %s", name, constant)
				continue
			}
			var got uint32
			if err := v.Get(&got); err != nil || got != want || !v.Constant() {
				t.Errorf("%s: %s is %d (constant: %v), %v, want %d", name, constant, got, v.Constant(), err, want)
			}
		}
		for m, want := range map[string]uint32{MapSockets: 6 * 40, MapFlows: 12345, MapVerdicts: 1, MapControl: 1, MapSecrets: 1} {
			if m == MapFlows && o.steering == SteeringStateless {
				continue
			}
			if got := spec.Maps[m].MaxEntries; got != want {
				t.Errorf("%s: %s has %d entries, want %d", name, m, got, want)
			}
		}
		for m, want := range map[string]ebpf.MapType{
			MapSockets: ebpf.ReusePortSockArray, MapFlows: ebpf.LRUHash, MapVerdicts: ebpf.PerCPUArray,
			MapControl: ebpf.Array, MapSecrets: ebpf.Array,
		} {
			if m == MapFlows && o.steering == SteeringStateless {
				continue
			}
			if got := spec.Maps[m].Type; got != want {
				t.Errorf("%s: %s is a %v, want %v", name, m, got, want)
			}
		}
		if again, _, err := Spec(Config{Steering: o.steering, MaxGenerations: 1, MaxWorkers: 1, FlowEntries: 1, Prefix: 8, FlowTimeout: 1, Dissector: constant(1 << 62)}); err != nil || spec.Maps[MapSockets].MaxEntries != 240 || again.Maps[MapSockets].MaxEntries != 1 {
			t.Errorf("%s: a second Spec changed the first (%v)", name, err)
		}
	}
}

func TestSpecErrors(t *testing.T) {
	for _, steering := range []uint32{0, SteeringTCP + 1, 1 << 31} {
		spec, program, err := Spec(Config{Steering: steering, MaxGenerations: 1, MaxWorkers: 1, FlowEntries: 1, Prefix: 8})
		if !errors.Is(err, ErrSteering) || spec != nil || program != "" {
			t.Errorf("steering %d: %v, %q, %v; want ErrSteering", steering, spec, program, err)
		} else if !strings.Contains(err.Error(), fmt.Sprint(steering)) {
			t.Errorf("error %q does not name the steering %d", err, steering)
		}
	}
}

func TestSpecSizes(t *testing.T) {
	good := Config{Steering: SteeringQUIC, MaxGenerations: 256, MaxWorkers: 256, FlowEntries: 1, Prefix: 14}
	if _, _, err := Spec(good); err != nil {
		t.Errorf("%+v: %v", good, err)
	}
	for name, spoil := range map[string]func(c *Config){
		"MaxGenerations is 0":   func(c *Config) { c.MaxGenerations = 0 },
		"MaxGenerations is 257": func(c *Config) { c.MaxGenerations = 257 },
		"MaxWorkers is 0":       func(c *Config) { c.MaxWorkers = 0 },
		"MaxWorkers is 257":     func(c *Config) { c.MaxWorkers = 257 },
		"FlowEntries is -1":     func(c *Config) { c.FlowEntries = -1 },
		"Prefix is 7":           func(c *Config) { c.Prefix = 7 },
		"Prefix is 15":          func(c *Config) { c.Prefix = 15 },
		"FlowTimeout is 0":      func(c *Config) { c.Steering = SteeringFlow },
		"FlowLearning is 2":     func(c *Config) { c.Steering, c.FlowTimeout, c.FlowLearning = SteeringFlow, 1, 2 },
	} {
		c := good
		spoil(&c)
		if _, _, err := Spec(c); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v; want ErrConfig", name, err)
		}
	}
}

// TestNumbers: what the codec and the data plane both say has to be the same.
func TestNumbers(t *testing.T) {
	if PrefixMin != connid.MinPrefixLen || PrefixMax != connid.MaxPrefixLen {
		t.Errorf("prefixes of %d to %d octets, the codec has %d to %d", PrefixMin, PrefixMax, connid.MinPrefixLen, connid.MaxPrefixLen)
	}
	if got, want := int(quicInstarAbiINSTAR_CID_TRAILER), connid.DefaultLen-connid.MinPrefixLen; got != want {
		t.Errorf("trailer of %d octets, the codec has %d", got, want)
	}
	last := connid.Handle(1<<16 - 1)
	if MaxSlots != int(last.Slot())+1 || MaxWorkers != int(last.Worker())+1 {
		t.Errorf("%d slots of %d workers, a handle names up to %v", MaxSlots, MaxWorkers, last)
	}
	for v, name := range VerdictNames {
		if name == "" || strings.ToLower(name) != name || slices.Index(VerdictNames[:], name) != v {
			t.Errorf("verdict %d is called %q", v, name)
		}
	}
}

// TestVerifierCost loads each program and looks at how long the kernel had to
// think. Its limit is a million instructions.
func TestVerifierCost(t *testing.T) {
	needBPF(t)
	const ceiling = 100_000
	for name, o := range dataPlanes {
		for _, c := range []Config{
			{MaxGenerations: 8, MaxWorkers: 64, Prefix: PrefixMin},
			{MaxGenerations: 256, MaxWorkers: 256, Prefix: PrefixMin},
			{MaxGenerations: 8, MaxWorkers: 1, Prefix: PrefixMax},
		} {
			c.Steering, c.FlowEntries, c.FlowTimeout, c.Dissector = o.steering, 1024, 60, constant(1<<62)
			spec, program, err := Spec(c)
			if err != nil {
				t.Fatal(err)
			}
			coll := load(t, spec, ebpf.CollectionOptions{Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}})
			log := coll.Programs[program].VerifierLog
			_, stats, ok := strings.Cut(log, "processed ")
			var n int
			if _, err := fmt.Sscanf(stats, "%d insns", &n); !ok || err != nil {
				t.Fatalf("%s: no count in the verifier's log: %v\n%s", name, err, log)
			}
			t.Logf("%s, %d workers, prefix %d: %d instructions", name, c.MaxWorkers, c.Prefix, n)
			if n == 0 || n > ceiling {
				t.Errorf("%s: the verifier processed %d instructions, want at most %d", name, n, ceiling)
			}
		}
	}
}
