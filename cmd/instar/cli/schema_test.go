// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	generator "github.com/invopop/jsonschema"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"instar/dispatch"
)

// schemas is the folder of what --json prints.
const schemas = "../../../docs/schema"

var update = flag.Bool("update", false, "write docs/schema")

// documents are what the commands print with --json. Those with lines print one for each
// packet or flow.
var documents = map[string]any{
	"groups":         groupsJSON{},
	"show":           showJSON{},
	"flows":          flowJSON{},
	"trace":          eventJSON{},
	"watch":          changeJSON{},
	"doctor":         doctorJSON{},
	"status":         serverJSON{},
	"upgrade":        serverJSON{},
	"version":        buildJSON{},
	"demo":           demoJSON{},
	"demo tcp":       demoTCPJSON{},
	"demo wireguard": demoWireGuardJSON{},
}

func schemaFile(command string) string {
	return filepath.Join(schemas, strings.ReplaceAll(command, " ", "-")+".json")
}

// The schemas are those of the code. A change that takes something away needs another
// jsonVersion.
func TestSchemas(t *testing.T) {
	comments := commentsOf(t, "cmd/instar", "dispatch", "internal/doctor", "handover", "quicdemo", "tcpdemo", "wgdemo")
	for command, document := range documents {
		r := generator.Reflector{ExpandedStruct: true, AllowAdditionalProperties: true, Anonymous: true, Mapper: words, CommentMap: comments}
		s := r.Reflect(document)
		if g := s.Definitions["groupJSON"]; g != nil {
			// A group that cannot be read has no snapshot.
			g.Required = slices.DeleteFunc(g.Required, ofSnapshot)
		}
		s.Title = "instar " + command + " --json"
		s.ID = ""
		version, ok := s.Properties.Get("version")
		if !ok {
			t.Errorf("%s: no version", command)
			continue
		}
		version.Const = jsonVersion
		text, err := json.MarshalIndent(s, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, '\n')
		if *update {
			if err := os.WriteFile(schemaFile(command), text, 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if have, err := os.ReadFile(schemaFile(command)); err != nil || !bytes.Equal(have, text) {
			t.Errorf("%s is not what the code prints (%v): go test ./cmd/instar/cli -run TestSchemas -update", schemaFile(command), err)
		}
	}
	files, err := filepath.Glob(filepath.Join(schemas, "*.json"))
	if err != nil || len(files) != len(documents) {
		t.Errorf("files %q, %v; want %d", files, err, len(documents))
	}
}

// commentsOf are those of the types and fields in folders of the module.
func commentsOf(t *testing.T, folders ...string) map[string]string {
	t.Helper()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	defer t.Chdir(here)
	t.Chdir("../../..")
	var r generator.Reflector
	for _, folder := range folders {
		if err := r.AddGoComments("instar", folder); err != nil {
			t.Fatal(err)
		}
	}
	return r.CommentMap
}

// words are types that are written as text.
func words(t reflect.Type) *generator.Schema {
	if t == reflect.TypeFor[time.Time]() || !t.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
		return nil
	}
	return &generator.Schema{Type: "string"}
}

func ofSnapshot(name string) bool {
	for f := range reflect.TypeFor[dispatch.Snapshot]().Fields() {
		tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if tag == name && name != "path" {
			return true
		}
	}
	return false
}

// validate is "schema FILE COMMAND [SUBCOMMAND]": the file is what the command prints.
func validate(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(checkSchema(slices.Concat([]string{"instar"}, args[1:], []string{"--json"}), ts.ReadFile(args[0])))
}

// checkSchema checks what a command printed with --json.
func checkSchema(args []string, output string) error {
	if !slices.Contains(args, "--json") || output == "" {
		return nil
	}
	// The longest name, as "demo tcp" is no "demo".
	command := ""
	for name := range maps.Keys(documents) {
		words := strings.Fields(name)
		if len(args) > len(words) && slices.Equal(args[1:1+len(words)], words) && len(name) > len(command) {
			command = name
		}
	}
	if command == "" {
		return fmt.Errorf("%q: no schema", args)
	}
	s, err := jsonschema.NewCompiler().Compile(schemaFile(command))
	if err != nil {
		return err
	}
	for d := json.NewDecoder(strings.NewReader(output)); d.More(); {
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return err
		}
		v, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
		if err != nil {
			return err
		}
		if err := s.Validate(v); err != nil {
			return fmt.Errorf("instar %s --json: %w", command, err)
		}
	}
	return nil
}
